"""What one device runs for each operation."""

from meshdsl.lowering.local import effects, indexing, ordering, random, slicing, structural, transforms, windows, words
from meshdsl.lowering.local.registry import Local, bind, local, run_local

__all__ = [
    "Local",
    "bind",
    "effects",
    "indexing",
    "local",
    "ordering",
    "random",
    "run_local",
    "slicing",
    "structural",
    "transforms",
    "windows",
    "words",
]
