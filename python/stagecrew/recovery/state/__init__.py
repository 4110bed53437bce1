"""State handles: states as bytes in a state storage, and named references to them in the coordination store."""
