"""Options: all that ``parallelize`` was asked for, normalised at the edge into one frozen value."""

import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from meshdsl.errors import MeshDSLError
from meshdsl.globs import quote, split_path
from meshdsl.ir import Leaf
from meshdsl.layouts.layout import Layout
from meshdsl.layouts.mesh import Mesh
from meshdsl.plan.value import Plan

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
_MEMORY = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]i?|)B?\s*")
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


@dataclass(frozen=True)
class Options:
    """What :func:`meshdsl.parallelize` documents; memory in bytes."""

    mesh: Mesh
    layouts: Mapping[str, Layout | str] = field(default_factory=dict)
    outputs: Mapping[str, Layout | str] = field(default_factory=dict)
    memory: float | None = None
    donate_argnums: tuple[int, ...] = ()
    donate_argnames: tuple[str, ...] = ()
    static_argnums: tuple[int, ...] = ()
    static_argnames: tuple[str, ...] = ()
    plan: Plan | None = None
    devices: tuple[jax.Device, ...] | None = None


def memory_bytes(memory: str | float | None) -> float | None:
    """Bytes of ``"60GiB"``, ``"2.5 GB"`` or a number; MeshDSLError for anything else."""
    if memory is None or isinstance(memory, int | float):
        return memory
    match = _MEMORY.fullmatch(memory)
    if match is None:
        raise MeshDSLError(f"memory={memory!r} is no size; write bytes, or text like '60GiB' or '500MB'")
    return float(match.group(1)) * _UNITS[match.group(2)]


def several(x: int | str | Iterable[Any]) -> tuple[Any, ...]:
    """One number or name, or several of them, as a tuple."""
    return (x,) if isinstance(x, int | str) else tuple(x)


def donated_leaves(step: Callable[..., Any], inputs: Sequence[Leaf], options: Options) -> tuple[int, ...]:
    """Flat indices of the leaves of the donated arguments."""
    if not (options.donate_argnums or options.donate_argnames):
        return ()
    names = [p.name for p in inspect.signature(step).parameters.values() if p.kind in _POSITIONAL]
    named: list[tuple[str, ...]] = [(quote(name),) for name in options.donate_argnames]
    heads = {*named, *(_head(i, names) for i in options.donate_argnums)}
    paths = [split_path(leaf.path) for leaf in inputs]
    return tuple(i for i, path in enumerate(paths) if path[:1] in heads or path[:2] in heads)


def _head(number: int, names: Sequence[str]) -> tuple[str, ...]:
    """How the paths of a positional argument begin."""
    return (quote(names[number]),) if number < len(names) else ("args", str(number - len(names)))
