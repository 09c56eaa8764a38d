"""``inspect_script``: runs a training script as it is, and inspects the steps that it jits at their first calls.

``jax.jit`` is replaced while the script runs, so that nothing in it changes: what it returns records the arguments of
each kind of call, and calls the real function. A call inside of another jitted function is a part of that one.
"""

import re
import runpy
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, update_wrapper
from math import prod
from pathlib import Path
from typing import Any

import jax
import jax.experimental.pjit

from meshdsl.api.calls import leaf_type
from meshdsl.api.inspect import Inspection, inspect
from meshdsl.api.traced_step import OneDeviceError
from meshdsl.errors import ArgumentError, nearest
from meshdsl.layouts.topology import Topology

_TOO_FEW = re.compile(r"Number of devices (\d+) must be >= the product of mesh_shape \(([\d, ]+)\)")


class _StepInspected(BaseException):
    """Ends the script when the wanted step has been inspected; no ``except Exception`` of the script catches it."""


def inspect_script(
    file: Path | str,
    arguments: Sequence[str] = (),
    step: str | None = None,
    topology: Topology | str | None = None,
    target: str | None = None,
) -> list[Inspection]:
    """Run a script, and return what its jitted functions over several devices communicate, in order of their calls.

    Args:
      file: the script; it runs as ``__main__``.
      arguments: what it finds in ``sys.argv`` behind its own name.
      step: name of the function to inspect; the script ends at its first call, before that runs. Default: all of them,
        until the script ends.
      topology: that seconds are predicted for; default is that of the target, or of the devices at hand.
      target: absent devices to compile for, see ``inspect``.

    Raises:
      ArgumentError: the script calls no such function, or makes a mesh of more devices than there are.
    """
    recorder = _Recorder(step, topology, target)
    before = sys.argv, sys.path
    sys.argv, sys.path = [str(file), *arguments], [str(Path(file).resolve().parent), *sys.path]
    try:
        with recorder.recording():
            runpy.run_path(str(file), run_name="__main__")
    except _StepInspected:
        pass
    except SystemExit as end:
        if end.code not in (None, 0) and not recorder.found:
            raise ArgumentError(f"{file} ended with status {end.code} before it called a jitted function") from end
    except ValueError as error:
        if match := _TOO_FEW.search(str(error)):
            size = prod(int(n) for n in match[2].split(",") if n.strip())
            raise ArgumentError(
                f"{file} makes a mesh of {size} devices, and {match[1]} are here: --devices {size} makes virtual ones"
            ) from error
        raise
    finally:
        sys.argv, sys.path = before
    if not recorder.found:
        known = f"; it called {', '.join(recorder.called)}" if recorder.called else ""
        if step is not None:
            raise ArgumentError(
                f"{file} calls no jitted function {step!r} over several devices{nearest(step, recorder.called)}{known}"
            )
        raise ArgumentError(f"{file} calls no jitted function over several devices{known}")
    return recorder.found


class _Recorder:
    """The jitted functions that a script calls.

    Attributes:
      called: their names.
      found: the inspections of those over several devices.
    """

    def __init__(self, step: str | None, topology: Topology | str | None, target: str | None) -> None:
        self._step, self._topology, self._target = step, topology, target
        self._seen: set[Any] = set()
        self.called: list[str] = []
        self.found: list[Inspection] = []

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Replaces ``jax.jit``, and ``pjit``, its old name, within a context."""
        jit, old = jax.jit, _old_pjit()
        jax.jit = partial(self._jit, jit)
        if old is not None:
            vars(jax.experimental.pjit)["pjit"] = partial(self._jit, old)
        try:
            yield
        finally:
            jax.jit = jit
            if old is not None:
                del vars(jax.experimental.pjit)["pjit"]  # it is made at every reading, with a warning

    def _jit(self, jit: Callable[..., Any], fun: Any = None, **options: Any) -> Any:
        if fun is None:  # as a decorator with options
            return partial(self._jit, jit, **options)
        return _Recorded(jit(fun, **options), self)

    def add(self, function: Any, args: Any, kwargs: Any) -> None:
        """Inspects a function at the first call of its kind."""
        leaves, tree = jax.tree.flatten((args, kwargs))
        if any(isinstance(x, jax.core.Tracer) for x in leaves):
            return
        shapes = [_shape(x) for x in leaves]
        key = function, tree, tuple(map(_key, shapes))
        name = getattr(function, "__name__", str(function))
        if name not in self.called:
            self.called.append(name)
        if key in self._seen or self._step not in (None, name):
            return
        self._seen.add(key)
        given, keywords = jax.tree.unflatten(tree, shapes)
        try:
            found = inspect(function, *given, topology=self._topology, target=self._target, **keywords)
        except OneDeviceError:
            return
        self.found.append(found)
        if self._step is not None:
            raise _StepInspected


def _old_pjit() -> Any:
    """``jax.experimental.pjit.pjit``; None where jax has it no more."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return getattr(jax.experimental.pjit, "pjit", None)


class _Recorded:
    """A jitted function whose calls are recorded; everything else is that of the function."""

    def __init__(self, function: Any, recorder: _Recorder) -> None:
        self._function, self._recorder = function, recorder
        update_wrapper(self, function, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._recorder.add(self._function, args, kwargs)
        return self._function(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._function, name)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else partial(self, instance)  # a method


def _shape(x: Any) -> Any:
    """An array as a shape that lies where the array lies; anything else as it is."""
    if not isinstance(x, jax.Array):
        return x
    at = x.sharding if x.committed else None
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at, weak_type=x.weak_type)


def _key(x: Any) -> Any:
    """What tells a kind of call: the type of an array or a number, a static argument itself if it can be compared."""
    if hasattr(x, "dtype") or isinstance(x, int | float | complex):
        return leaf_type(x), getattr(x, "sharding", None)
    try:
        hash(x)
    except TypeError:
        return id(x)
    return x
