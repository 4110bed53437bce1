"""The driver: campaigns for leadership, and while it leads, runs every open job in a separate process."""
