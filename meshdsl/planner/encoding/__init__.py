"""docstring: two networks, `plans` (upper) and `bounds` (lower)."""
