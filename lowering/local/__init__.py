"""What one device runs for each operation."""

from meshdsl.lowering.local import convolution, indexing, linalg, random, reduction, shape
from meshdsl.lowering.local.registry import Local, bind, local, run_local

__all__ = [
    "Local",
    "bind",
    "convolution",
    "indexing",
    "linalg",
    "local",
    "random",
    "reduction",
    "run_local",
    "shape",
]
