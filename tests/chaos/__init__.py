"""Random faults in supervised runs: ``python -m tests.chaos --faults 100 --seed 0``."""

BATCH = 24  # rows, which 2, 3 and 4 processes share equally
