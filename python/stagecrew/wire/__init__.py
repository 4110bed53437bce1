"""What travels between processes: frames, serialization, and the client of the channel."""
