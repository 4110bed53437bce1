"""What runs inside Spark's Python workers."""
