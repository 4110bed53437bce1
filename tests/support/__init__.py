"""What several test modules share: servers, processes, simulations, recorders and schedules of faults."""
