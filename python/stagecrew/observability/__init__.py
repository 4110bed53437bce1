"""What people read: logs, the console, reports from event logs, and the first line of an error."""
