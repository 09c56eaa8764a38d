"""An adapter: how the training step of someone else's program is imported from a checkout and given arguments.

    checkout   FOLDER/dm-haiku or FOLDER/deepmind+dm-haiku, at the adapter's commit
    build      imports the author's modules, returns their step with small arguments, or shapes of published size

Only what loads data, writes logs or is not used by the step may be a stub: a module in which every attribute exists
and does nothing.
"""

import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any


@dataclass(frozen=True)
class Training:
    """A training step with its arguments.

    Args:
      step: the author's function, one that ``jax.pmap`` returned, or a ``functools.partial`` of one with its options.
      args: the first arguments; shapes without values at the published size.
      batch: the dim that the data axes of a mesh split, by globs over paths of arguments.
      next_args: from the arguments of a step, what it returned, and a seed for the next batch, to the next arguments.
        Objects of nnx among the arguments are changed in place, so the same ones are passed on.
      axis: the axis name of the step's collectives; None if it is written for whole arrays.
    """

    step: Callable[..., Any]
    args: tuple[Any, ...]
    batch: Mapping[str, int]
    next_args: Callable[[tuple[Any, ...], Any, int], tuple[Any, ...]]
    axis: str | None = None


@dataclass(frozen=True)
class Adapter:
    """A public training program.

    Args:
      what: the program in a few words, for the page.
      repository: on GitHub.
      commit: for which the adapter was written.
      build: from ``"small"`` or ``"large"`` to the step.
      large: the published size, for the page.
      changed: lines of the program that change, one sentence each.
      aged: lines that the releases of jax and its libraries that are used here demand, one sentence each.
      folders: of the checkout, from which modules are imported.
      stubs: modules that load data, write logs, or are of no use to the step.
    """

    what: str
    repository: str
    commit: str
    build: Callable[[str], Training]
    large: str
    changed: tuple[str, ...] = ()
    aged: tuple[str, ...] = ()
    folders: tuple[str, ...] = ("",)
    stubs: tuple[str, ...] = ()

    def checkout(self, folder: Path) -> Path | None:
        """Returns the checkout among those of ``folder``: by its own name, or as ``owner+name``; None if absent."""
        owner, name = self.repository.split("/")
        found = (folder / f"{owner}+{name}", folder / name)
        return next((path for path in found if path.is_dir()), None)

    @contextmanager
    def importable(self, checkout: Path) -> Iterator[None]:
        """Makes the author's modules importable, with stubs for what loads data; all are gone at the end."""
        before, finder = set(sys.modules), _Stubs(self.stubs)
        paths = [str(checkout / folder) for folder in self.folders]
        sys.path[:0], sys.meta_path[:0] = paths, [finder]
        try:
            yield
        finally:
            del sys.path[: len(paths)]
            sys.meta_path.remove(finder)
            for name in sys.modules.keys() - before:
                module = sys.modules[name]
                if isinstance(module, _Stub) or (getattr(module, "__file__", None) or "").startswith(str(checkout)):
                    del sys.modules[name]


def commit_of(checkout: Path) -> str | None:
    """Returns the commit that is checked out; None for an exported folder."""
    if not (checkout / ".git").exists():
        return None
    command = ["git", "-C", str(checkout), "rev-parse", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip() or None


# ---- Stubs -----------------------------------------------------------------------------------------------------------


class _NothingType(type):
    """Of ``_Nothing``, so that it can be called, subscripted, and asked for any attribute, and is a class."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, **kwargs) if cls is not _Nothing else cls

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Nothing

    def __getitem__(cls, key: Any) -> Any:
        return cls

    def __enter__(cls) -> Any:
        return cls

    def __exit__(cls, *error: object) -> None:
        """Ends the context of nothing."""


class _Nothing(metaclass=_NothingType):
    """Stands for any value of a stub, and may be the base of a class."""


class _Stub(ModuleType):
    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Nothing


class _Stubs(MetaPathFinder, Loader):
    """Finds empty modules of these names, and whatever is imported from inside them."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Returns a spec for a stub; None for other modules."""
        stubbed = any(name == each or name.startswith(f"{each}.") for each in self.names)
        return ModuleSpec(name, self, is_package=True) if stubbed else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Returns the stub."""
        return _Stub(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Does nothing."""
