"""How good the planner's plans are, how well that is proved, and how long it takes: ``docs/planner.md``."""
