"""docstring: XLA buffer model."""
