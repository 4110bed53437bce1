"""Reports of stored partitions, and the policies that release them."""
