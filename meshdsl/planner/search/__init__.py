"""docstring: primal heuristics."""
