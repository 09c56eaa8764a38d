"""docstring: variables, domains, constraints."""
