"""The process of one run of a job."""
