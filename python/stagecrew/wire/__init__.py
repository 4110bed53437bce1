"""The wire format between processes: frames, serialization, and the channel's client."""
