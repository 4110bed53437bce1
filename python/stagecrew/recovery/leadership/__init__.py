"""Leadership: terms, the fences of each write, the rules of the election, and the candidate."""
