"""docstring: the limit as a constraint; primal and dual."""
