"""Benchmarks: each module prints markdown tables with the machine and versions they were measured on.

``report`` has timing and tables; ``programs``, ``unrolled`` and ``deep_steps`` build the measured steps; ``peers`` and
``rolled_buffer`` build what they are compared with. Each package writes a page: ``planner`` docs/evidence/planner.md,
``published`` docs/evidence/predictions.md, ``targets`` docs/evidence/targets.md and ``zoo`` docs/evidence/zoo.md.
"""
