"""Watch: what the programs communicate that were compiled inside a ``with``, whoever made them.

    with md.watch(mesh) as comm:
        step(state, batch)
    print(comm)
    comm.assert_at_most(bytes=2**20, kinds={"all-reduce": 2})

It reads the compiled programs, not the calls: what was compiled before is not counted, and what
is compiled once and called often counts once. So a step is watched at its first call.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax

from meshdsl.errors import ArgumentError, is_a
from meshdsl.layouts.mesh import Mesh
from meshdsl.lowering.hlo.collectives import CompiledCollective, compiled_collectives
from meshdsl.plan.budget import Kinds, check_budget
from meshdsl.util.text import bytes_text

_COMPILED = "/jax/core/compile/backend_compile_duration"


@dataclass(frozen=True)
class CompiledStep:
    """One program that was compiled.

    Args:
      name: as XLA calls it, ``jit_step``.
    """

    name: str
    collectives: tuple[CompiledCollective, ...]

    @property
    def bytes(self) -> int:
        """What one device sends in one run."""
        return round(sum(c.bytes * c.trips for c in self.collectives))


class Watch:
    """The programs that were compiled while it watched, in order.

    Args:
      mesh: names the axes that collectives run over; without one they are ``None`` but for all devices.
    """

    def __init__(self, mesh: Mesh | None = None) -> None:
        self._mesh = mesh
        self._lock = threading.Lock()
        self._found: dict[int, Any] = {}
        self._before = {id(each): each for each in _alive()}

    def look(self) -> None:
        """Take note of the programs that were compiled since."""
        with self._lock:
            self._found |= {id(each): each for each in _alive() if id(each) not in self._before}
        self.__dict__.pop("programs", None)

    @cached_property
    def programs(self) -> tuple[CompiledStep, ...]:
        """Those over several devices that communicate."""
        found = (_read(each, self._mesh) for each in self._found.values())
        return tuple(each for each in found if each.collectives)

    @property
    def collectives(self) -> tuple[CompiledCollective, ...]:
        """Of all programs: ``.kind .axes .bytes`` (of one device, per trip) ``.trips``."""
        return tuple(c for each in self.programs for c in each.collectives)

    @property
    def bytes(self) -> int:
        """What one device sends if every program runs once."""
        return sum(each.bytes for each in self.programs)

    @property
    def counts(self) -> dict[str, int]:
        """How often each kind of collective runs if every program runs once."""
        kinds = sorted({c.kind for c in self.collectives})
        return {kind: sum(c.trips for c in self.collectives if c.kind == kind) for kind in kinds}

    def assert_at_most(self, bytes: float | None = None, kinds: Kinds | None = None) -> None:
        """Raise BudgetError, an AssertionError, if the programs communicate more than this; see ``Plan``'s."""
        check_budget("what was compiled", self.collectives, bytes, kinds)

    def __str__(self) -> str:
        rows = [
            f"  {each.name}: {c.kind} over {_over(c)}, {bytes_text(round(c.bytes))} x {c.trips}"
            for each in self.programs
            for c in each.collectives
        ]
        return "\n".join(
            [f"{bytes_text(self.bytes)} per device in {len(rows)} compiled collective{'s' * (len(rows) != 1)}", *rows]
        )


@contextmanager
def watch(mesh: Mesh | None = None) -> Iterator[Watch]:
    """Count what the programs compiled inside communicate.

    Args:
      mesh: names the axes; for any program, also one that XLA partitions.

    ArgumentError if it is no mesh.
    """
    if mesh is not None and not isinstance(mesh, Mesh):
        raise ArgumentError(f"watch: {is_a(mesh)}, not a mesh; md.Mesh(data=4, model=2) is one")
    seen = Watch(mesh)
    listener = _listener(seen)
    jax.monitoring.register_event_duration_secs_listener(listener)
    try:
        yield seen
    finally:
        jax.monitoring.unregister_event_duration_listener(listener)
        seen.look()


def _listener(seen: Watch) -> Callable[..., None]:
    """Looks after every compilation: a program may be gone before the end."""

    def compiled(event: str, seconds: float, **rest: Any) -> None:
        if event == _COMPILED:
            seen.look()

    return compiled


def _alive() -> list[Any]:
    """The executables that the backend holds."""
    return list(jax.devices()[0].client.live_executables())


def _read(executable: Any, mesh: Mesh | None) -> CompiledStep:
    module, devices = executable.hlo_modules()[0], len(executable.local_devices())
    over = mesh if mesh is not None and mesh.size == devices else Mesh(devices=devices)
    return CompiledStep(module.name, compiled_collectives(module.to_string(), over) if devices > 1 else ())


def _over(c: CompiledCollective) -> str:
    return ",".join(c.axes) if c.axes else f"groups of {c.group}"
