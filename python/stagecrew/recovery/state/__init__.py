"""State handles: the bytes of states in a state storage, and named references to them in the coordination store."""
