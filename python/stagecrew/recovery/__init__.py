"""Recovery: what a driver must know to go on after another has died, kept in a store, under one leader at a time."""
