"""Output for people: logs, the console, reports from event logs, and the line that summarizes an error."""
