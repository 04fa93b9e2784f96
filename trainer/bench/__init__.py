"""Benchmarks that ship with the trainer: one command each, results as JSON with the machine they ran on."""
