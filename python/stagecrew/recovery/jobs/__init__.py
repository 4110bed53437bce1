"""Jobs: their specifications, records and results, and the object through which a job's own code uses them."""
