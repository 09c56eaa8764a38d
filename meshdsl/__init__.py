"""meshdsl: plan a whole training step over a device mesh, read the plan, run exactly that plan.

Names are loaded on first use, so that ``import meshdsl.layouts`` does not import jax.
"""

from importlib import import_module
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parent.parent
if not (Path(__file__).parent / "layouts").exists() and (_ROOT / "layouts").exists():
    __path__.append(str(_ROOT))  # a checkout: layouts/, lowering/ and models/ lie beside this package

_NAMES = {
    "meshdsl.layouts": ("B", "Layout", "Mesh", "P", "S", "Topology", "topology"),
    "meshdsl.errors": ("CheckError", "MeshDSLError", "VerifyError"),
    "meshdsl.constraint": ("constrain",),
    "meshdsl.custom": ("rule",),
    "meshdsl.api": ("Program", "Sharded", "parallelize"),
    "meshdsl.plan": ("Plan", "load_plan"),
}
_HOME = {name: module for module, names in _NAMES.items() for name in names}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        from meshdsl.errors import nearest

        raise AttributeError(f"meshdsl has no {name!r}{nearest(name, __all__)}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return __all__
