"""What users call: ``parallelize`` and the stages behind it, executables, explanations, the search over meshes."""

from meshdsl.api.program import Program
from meshdsl.api.sharded import Sharded, parallelize

__all__ = ["Program", "Sharded", "parallelize"]
