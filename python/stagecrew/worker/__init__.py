"""The code that runs in an executor's Python processes: Spark's daemon and workers, and stagecrew's agent."""
