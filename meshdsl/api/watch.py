"""``watch``: the collectives of all programs that are compiled inside a ``with``, by meshdsl or by plain JAX.

    with md.watch(mesh) as comm:
        step(state, batch)
    print(comm)
    comm.assert_at_most(bytes=2**20, kinds={"all-reduce": 2})

It reads compiled programs, not calls: a program that was compiled before is not counted, and one that is compiled once
and called often counts once. So a step is watched at its first call.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax

from meshdsl.errors import ArgumentError, is_a
from meshdsl.layouts.mesh import Mesh
from meshdsl.lowering.hlo.collectives import CompiledCollective, compiled_collectives
from meshdsl.plan.budget import Kinds, check_budget
from meshdsl.shardings import StatedMesh, mesh_of
from meshdsl.util.text import bytes_text, count_text

COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"  # of jax.monitoring, after every compilation


@dataclass(frozen=True)
class CompiledStep:
    """One compiled program.

    Args:
      name: its name in XLA, ``jit_step``.
      collectives: its collectives, in program order.
    """

    name: str
    collectives: tuple[CompiledCollective, ...]

    @property
    def bytes(self) -> int:
        """Bytes that one device sends in one run."""
        return round(sum(c.bytes * c.trips for c in self.collectives))


class Watch:
    """The programs that were compiled inside the ``with``, in order; ``print`` lists their collectives.

    Args:
      mesh: names the axes that collectives run over; without one, only collectives over all devices have an axis.

    Example:
      >>> mesh = jax.make_mesh((8,), ("data",))
      >>> rows = jax.device_put(jnp.ones((64, 8)), jax.NamedSharding(mesh, jax.P("data")))
      >>> with md.watch(mesh) as comm:
      ...     total = jax.jit(lambda x: x.sum())(rows)
      >>> comm.counts
      {'all-reduce': 1}
    """

    def __init__(self, mesh: Mesh | None = None) -> None:
        self._mesh = mesh
        self._lock = threading.Lock()
        self._found: dict[int, Any] = {}
        self._before = {id(each): each for each in _alive()}

    def look(self) -> None:
        """Record the programs that were compiled since the last call."""
        with self._lock:
            self._found |= {id(each): each for each in _alive() if id(each) not in self._before}
        self.__dict__.pop("programs", None)

    @cached_property
    def programs(self) -> tuple[CompiledStep, ...]:
        """The programs over several devices that communicate."""
        found = (_read(each, self._mesh) for each in self._found.values())
        return tuple(each for each in found if each.collectives)

    @property
    def collectives(self) -> tuple[CompiledCollective, ...]:
        """Collectives of all programs: ``.kind``, ``.axes``, ``.bytes`` (of one device, per run), ``.trips`` (runs)."""
        return tuple(c for each in self.programs for c in each.collectives)

    @property
    def bytes(self) -> int:
        """Bytes that one device sends if every program runs once."""
        return sum(each.bytes for each in self.programs)

    @property
    def counts(self) -> dict[str, int]:
        """Runs of each kind of collective if every program runs once."""
        kinds = sorted({c.kind for c in self.collectives})
        return {kind: sum(c.trips for c in self.collectives if c.kind == kind) for kind in kinds}

    def assert_at_most(self, bytes: float | None = None, kinds: Kinds | None = None) -> None:
        """Raise BudgetError, an AssertionError, if the programs communicate more.

        Args:
          bytes: limit on the bytes that one device sends if every program runs once.
          kinds: limits on the runs of each kind of collective, ``{"all-reduce": 2}``.
        """
        check_budget("what was compiled", self.collectives, bytes, kinds)

    def __str__(self) -> str:
        rows = [
            f"  {each.name}: {c.kind} over {_over(c)}, {bytes_text(round(c.bytes))} x {c.trips}"
            for each in self.programs
            for c in each.collectives
        ]
        return "\n".join(
            [f"{bytes_text(self.bytes)} per device in {count_text(len(rows), 'compiled collective')}", *rows]
        )


@contextmanager
def watch(mesh: StatedMesh | None = None) -> Iterator[Watch]:
    """Record the collectives of all programs that are compiled inside the ``with``.

    Args:
      mesh: names the axes of the collectives, also of programs that XLA's partitioner has partitioned: ours, one of
        jax, or its text.

    Yields:
      A :class:`Watch`, with the programs compiled so far.

    Raises:
      ArgumentError: ``mesh`` is not a mesh.

    Example:
      >>> with md.watch(md.Mesh(data=8)) as comm:
      ...     jax.jit(step, in_shardings=...)(params, batch)
      >>> comm.assert_at_most(kinds={"all-reduce": 1})
    """
    if mesh is not None and not isinstance(mesh, StatedMesh):
        raise ArgumentError(f"watch: {is_a(mesh)}, not a mesh; md.Mesh(data=4, model=2) is one")
    seen = Watch(None if mesh is None else mesh_of(mesh))

    def listener(event: str, duration_secs: float, **rest: Any) -> None:
        if event == COMPILE_EVENT:
            seen.look()  # at once: the program may be deleted before the end of the ``with``

    jax.monitoring.register_event_duration_secs_listener(listener)
    try:
        yield seen
    finally:
        jax.monitoring.unregister_event_duration_listener(listener)
        seen.look()


def _alive() -> list[Any]:
    """Return the executables that the backend holds."""
    return list(jax.devices()[0].client.live_executables())


def _read(executable: Any, mesh: Mesh | None) -> CompiledStep:
    module, devices = executable.hlo_modules()[0], len(executable.local_devices())
    over = mesh if mesh is not None and mesh.size == devices else Mesh(devices=devices)
    return CompiledStep(module.name, compiled_collectives(module.to_string(), over) if devices > 1 else ())


def _over(c: CompiledCollective) -> str:
    return ",".join(c.axes) if c.axes else f"groups of {c.group}"
