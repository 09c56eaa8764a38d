"""What one device runs for each operation."""

from meshdsl.lowering.local import structural
from meshdsl.lowering.local.registry import Local, bind, local, run_local

__all__ = ["Local", "bind", "local", "run_local", "structural"]
