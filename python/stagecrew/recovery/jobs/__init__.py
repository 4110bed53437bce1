"""Jobs: what they run, their records in the store, their results, and the job as its own code sees it."""
