"""Write a cache: attempts, commits, publishing."""
