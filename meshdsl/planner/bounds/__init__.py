"""docstring: certificates."""
