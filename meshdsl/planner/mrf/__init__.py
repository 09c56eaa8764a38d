"""docstring: pairwise cost network; knows no layouts."""
