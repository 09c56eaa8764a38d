"""Benchmarks of the planner, written to docs/evidence/planner.md: gaps, comparisons with other methods, times."""
