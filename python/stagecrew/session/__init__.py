"""The driver side of a session: its configuration, its topologies, and what they report."""
