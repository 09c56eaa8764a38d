"""Packages whose public names are listed in a stub file and imported on first use (PEP 562).

    # package/__init__.pyi                    # package/__init__.py
    from package.plan import Plan as Plan     __getattr__, __dir__, __all__ = attach_stub(__name__, __file__)
    from package.tensors import *

Type checkers and IDEs read the stub; at run time the same file tells in which module a name is defined, so there is one
list of names, and ``import package`` imports nothing else. Names of a star import can be reached, but are not listed by
``dir(package)``. The method is that of ``lazy_loader.attach_stub``, which Scientific Python projects use (SPEC 1).
"""

import ast
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from meshdsl.errors import nearest


def attach_stub(package: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return ``__getattr__``, ``__dir__`` and ``__all__`` for a package with a stub file.

    Args:
      package: the package's ``__name__``.
      file: its ``__file__``; the stub has the same name with the suffix ``.pyi``.
    """
    homes = stub_names(Path(file).with_suffix(".pyi"))
    listed = sorted(name for name in homes if name != "*")
    for starred in homes.pop("*", "").split():
        folder = Path(file).parent.joinpath(*starred.removeprefix(f"{package}.").split("."))
        homes = stub_names(folder / "__init__.pyi") | homes

    def __getattr__(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"{package} has no {name!r}{nearest(name, homes)}")
        if homes[name] == package:  # ``from package import module as module``
            return import_module(f"{package}.{name}")
        return getattr(import_module(homes[name]), name)

    return __getattr__, lambda: listed, listed


def stub_names(stub: Path) -> dict[str, str]:
    """Return the names that a stub imports, with their modules; ``"*"`` maps to all modules of star imports."""
    homes: dict[str, str] = {}
    for node in ast.parse(stub.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                earlier = f"{homes[alias.name]} " if alias.name == "*" and "*" in homes else ""
                homes[alias.name] = earlier + node.module
    return homes
