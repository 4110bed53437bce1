"""The `stagecrew driver` process: campaigns for leadership, and as leader runs each open job in a separate process."""
