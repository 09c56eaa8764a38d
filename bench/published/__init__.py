"""Predicted step times beside published measurements; ``python -m bench.published`` (see docs/predictions.md)."""
