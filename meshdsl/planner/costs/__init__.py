"""docstring: cost model."""
