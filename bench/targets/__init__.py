"""Plans checked by the compilers of absent TPUs and GPUs: ``python -m bench.targets`` writes docs/targets.md."""
