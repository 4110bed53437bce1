"""What is known of stored partitions, and when they are released."""
