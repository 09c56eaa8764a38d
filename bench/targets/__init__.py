"""Plans checked by compilers of absent TPUs and GPUs: ``python -m bench.targets`` writes docs/evidence/targets.md."""
