"""Options: all that ``parallelize`` was asked for, normalised at the edge into one frozen value."""

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

import jax

from meshdsl.errors import MeshDSLError, nearest
from meshdsl.globs import quote, split_path
from meshdsl.ir import Leaf
from meshdsl.layouts.layout import Layout
from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.rules import Rules
from meshdsl.pipeline.spec import Pipeline
from meshdsl.plan.value import Plan

_UNITS = {
    "": 1,
    "k": 10**3,
    "K": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
    "Ki": 2**10,
    "Mi": 2**20,
    "Gi": 2**30,
    "Ti": 2**40,
}
_SETTINGS = (
    *("jax_enable_x64", "jax_default_matmul_precision", "jax_numpy_dtype_promotion", "jax_numpy_rank_promotion"),
    *("jax_default_prng_impl", "jax_threefry_partitionable"),
)
_MEMORY = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(k|[KMGT]i?|)B?\s*")
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_ANY = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


@dataclass(frozen=True)
class Options:
    """What :func:`meshdsl.parallelize` documents; memory in bytes."""

    mesh: Mesh
    layouts: Mapping[str, Layout | str] = field(default_factory=dict)
    rules: Rules = field(default_factory=Rules)
    outputs: Mapping[str, Layout | str] = field(default_factory=dict)
    memory: float | None = None
    donate_argnums: tuple[int, ...] = ()
    donate_argnames: tuple[str, ...] = ()
    static_argnums: tuple[int, ...] = ()
    static_argnames: tuple[str, ...] = ()
    plan: Plan | None = None
    devices: tuple[jax.Device, ...] | None = None
    pipeline: Pipeline | None = None
    overlap: bool = False
    time_limit: float | None = None


def settings() -> tuple[Any, ...]:
    """What of jax's configuration a trace depends on, as it stands here."""
    return tuple(getattr(jax.config, name) for name in _SETTINGS)


def memory_bytes(memory: str | float | None) -> float | None:
    """Bytes of ``"60GiB"``, ``"2.5 GB"`` or a positive number; MeshDSLError for anything else."""
    if memory is None:
        return None
    match = _MEMORY.fullmatch(memory) if isinstance(memory, str) else None
    size = float(match.group(1)) * _UNITS[match.group(2)] if match else memory
    if not isinstance(size, Real) or isinstance(memory, bool) or not size > 0:
        raise MeshDSLError(f"memory={memory!r} is no size; write bytes, or text like '60GiB' or '500MB'")
    return float(size)


def argument_faults(step: Callable[..., Any], options: Options) -> list[str]:
    """A row for every static or donated argument that the step does not have, or that is both."""
    parameters = _parameters(step)
    return [*_absent_numbers(parameters, options), *_absent_names(parameters, options), *_both(parameters, options)]


def _parameters(step: Callable[..., Any]) -> tuple[inspect.Parameter, ...]:
    """Of the step; those of ``(*args, **kwargs)`` for builtins without a signature."""
    try:
        return tuple(inspect.signature(step).parameters.values())
    except ValueError:
        return tuple(inspect.Parameter(kind.name, kind) for kind in _ANY)


def _absent_numbers(parameters: Sequence[inspect.Parameter], options: Options) -> Iterator[str]:
    count = len(_positional(parameters))
    if any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters):
        return
    for name, numbers in (("static_argnums", options.static_argnums), ("donate_argnums", options.donate_argnums)):
        for i in numbers:
            if not -count <= i < count:
                yield f"{name}={i}: the step takes {count} positional argument{'' if count == 1 else 's'}"


def _absent_names(parameters: Sequence[inspect.Parameter], options: Options) -> Iterator[str]:
    known = [p.name for p in parameters if p.kind not in _ANY]
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
        return
    for name, words in (("static_argnames", options.static_argnames), ("donate_argnames", options.donate_argnames)):
        yield from (
            f"{name}={word!r}: the step has no such argument{nearest(word, known)}"
            for word in words
            if word not in known
        )


def _both(parameters: Sequence[inspect.Parameter], options: Options) -> Iterator[str]:
    names = _positional(parameters)
    static = _meant(names, options.static_argnums, options.static_argnames)
    donated = _meant(names, options.donate_argnums, options.donate_argnames)
    yield from (f"{name}: is static, so it has no buffer to donate" for name in donated if name in static)


def _meant(names: Sequence[str], numbers: Iterable[int], words: Iterable[str]) -> list[str]:
    """Arguments by name, those that are given by number included."""
    return [*words, *(names[i] for i in numbers if -len(names) <= i < len(names))]


def _positional(parameters: Iterable[inspect.Parameter]) -> list[str]:
    return [p.name for p in parameters if p.kind in _POSITIONAL]


def donated_leaves(step: Callable[..., Any], inputs: Sequence[Leaf], options: Options) -> tuple[int, ...]:
    """Flat indices of the leaves of the donated arguments."""
    if not (options.donate_argnums or options.donate_argnames):
        return ()
    parameters = _parameters(step)
    named: list[tuple[str, ...]] = [(quote(name),) for name in options.donate_argnames]
    heads = {*named, *(_head(i, parameters) for i in options.donate_argnums)}
    paths = [split_path(leaf.path) for leaf in inputs]
    return tuple(i for i, path in enumerate(paths) if path[:1] in heads or path[:2] in heads)


def _head(number: int, parameters: Sequence[inspect.Parameter]) -> tuple[str, ...]:
    """How the paths of a positional argument begin."""
    names = _positional(parameters)
    if number < len(names):
        return (quote(names[number]),)
    starred = next(p.name for p in parameters if p.kind is inspect.Parameter.VAR_POSITIONAL)
    return quote(starred), str(number - len(names))
