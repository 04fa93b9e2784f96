"""Mutated files and JSON objects of every format that is read: each ends in a coded error or in a right result."""
