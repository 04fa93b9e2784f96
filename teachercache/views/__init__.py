"""Show a cache to people: terminal, report page, export."""
