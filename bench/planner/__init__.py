"""Benchmarks of the planner, written to docs/planner.md: optimality gaps, comparisons with other methods, times."""
