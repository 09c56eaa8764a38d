"""Ordered pass list `PASSES` (today `CLEANUPS` in trace/__init__)."""
