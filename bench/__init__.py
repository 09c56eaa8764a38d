"""Benchmarks: each module prints one markdown table with the machine and versions it ran on."""
