"""Measurements of the loss and of whole steps; only the two commands and benchmarks/ import them."""
