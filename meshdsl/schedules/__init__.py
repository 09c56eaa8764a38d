"""Pipelines: schedules as data, their check, and what they cost."""
