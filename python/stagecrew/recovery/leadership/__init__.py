"""Leadership: the terms, the fences that every write carries, the pure rules of the election, and the candidate."""
