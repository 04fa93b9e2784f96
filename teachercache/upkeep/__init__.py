"""Keep a cache healthy: verify, optimize, collect garbage."""
