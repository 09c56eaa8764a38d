"""Search: how to train a step on so many devices; every shape of the mesh planned, the fastest first.

    print(md.search(program, devices=64, topology="dgx-h100"))
    print(md.search(step, params, batch, devices=64, rules="batch:data hidden:model", microbatches=(1, 4)))

A candidate is a mesh, which shares the devices out over the axes in one of all ways, and a number
of microbatches. Each is planned in full, so what is compared are plans with their predictions. A
candidate that cannot be planned, for want of memory say, is listed last, with the reason.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from meshdsl.errors import ArgumentError, MeshDSLError, faults, is_a
from meshdsl.layouts.layout import Layout
from meshdsl.layouts.mesh import Mesh
from meshdsl.layouts.rules import Rules
from meshdsl.layouts.topology import Topology
from meshdsl.pipeline.spec import Pipeline
from meshdsl.plan.table import table
from meshdsl.plan.value import Plan
from meshdsl.planned import planned
from meshdsl.program import Program
from meshdsl.units import bytes_text, seconds_text


@dataclass(frozen=True)
class Candidate:
    """A way to run the step: its plan, or why there is none."""

    mesh: Mesh
    microbatches: int
    plan: Plan | None
    fault: str = ""

    @property
    def seconds(self) -> float:
        """Predicted seconds of a step; infinite without a plan."""
        return self.plan.seconds if self.plan else float("inf")

    @property
    def facts(self) -> dict[str, Any]:
        """As plain values."""
        found = {"mesh": str(self.mesh), "microbatches": self.microbatches}
        if self.plan is None:
            return found | {"fault": self.fault}
        return found | {name: getattr(self.plan, name) for name in ("seconds", "gap", "bytes", "memory")}


@dataclass(frozen=True)
class Search:
    """All candidates, the fastest first."""

    candidates: tuple[Candidate, ...]

    @property
    def best(self) -> Candidate:
        """The fastest; ArgumentError with the reasons if none can be planned."""
        if self.candidates[0].plan is None:
            rows = [f"{each.mesh}: {each.fault}" for each in self.candidates]
            raise ArgumentError(faults("no candidate can be planned:", rows))
        return self.candidates[0]

    def __str__(self) -> str:
        head = ("mesh", "microbatches", "step", "gap", "sent", "memory", "")
        return "\n".join(table([head, *map(_row, self.candidates)]))


def search(
    step: Callable[..., Any] | Program,
    *args: Any,
    devices: int,
    topology: Topology | str = "cpu",
    axes: Sequence[str] = ("data", "model"),
    microbatches: Sequence[int] = (1,),
    layouts: Mapping[str, Layout | str] | None = None,
    rules: Rules | str | None = None,
    memory: str | None = None,
    progress: Callable[[str], None] = lambda said: None,
) -> Search:
    """The plans of a step on ``devices`` devices, over every mesh of these axes.

    Args:
      step: a program, or a function; then ``args`` are its arguments, arrays or ``jax.ShapeDtypeStruct``.
      topology: what the devices and links cost; a preset's name, or a topology.
      axes: of the mesh, outermost first; one may get a single device.
      microbatches: numbers of microbatches to try, 1 for the whole batch at once.
      layouts: as in ``parallelize``, for a function. rules, memory: likewise; for a program, instead of its own.
      progress: told of every candidate before it is planned.

    Raises ArgumentError for what is no number of devices, no axes or no microbatches.
    """
    _check(devices, axes, microbatches, args, step)
    program = step if isinstance(step, Program) else Program(step, args, layouts)
    meshes = [Mesh(topology=topology, **dict(zip(axes, s, strict=True))) for s in _shares(devices, len(axes))]
    ways = [(mesh, count) for count in microbatches for mesh in meshes]
    found = []
    for i, (mesh, count) in enumerate(ways, 1):
        progress(f"{i} of {len(ways)}: {mesh}" + (f", {count} microbatches" if count > 1 else ""))
        found.append(_candidate(program, mesh, count, rules, memory))
    return Search(tuple(sorted(found, key=lambda each: each.seconds)))


def _candidate(program: Program, mesh: Mesh, count: int, rules: Rules | str | None, memory: str | None) -> Candidate:
    turns = Pipeline(microbatches=count) if count > 1 else None
    try:
        plan = planned(replace(program, pipeline=turns), mesh, rules, memory).plan(*program.args)
    except MeshDSLError as error:
        return Candidate(mesh, count, None, " ".join(str(error).split()))
    return Candidate(mesh, count, plan)


def _shares(devices: int, axes: int) -> Iterator[tuple[int, ...]]:
    """Every way to write ``devices`` as a product of so many sizes."""
    if axes == 1:
        yield (devices,)
        return
    for size in range(1, devices + 1):
        if devices % size == 0:
            yield from ((size, *rest) for rest in _shares(devices // size, axes - 1))


def _row(each: Candidate) -> tuple[str, ...]:
    count = str(each.microbatches) if each.microbatches > 1 else ""
    plan = each.plan
    if plan is None:
        return str(each.mesh), count, "", "", "", "", each.fault
    costs = seconds_text(plan.seconds), f"{plan.gap:.1%}", bytes_text(plan.bytes), bytes_text(plan.memory)
    return str(each.mesh), count, *costs, ""


def _check(devices: Any, axes: Any, microbatches: Any, args: tuple[Any, ...], step: Any) -> None:
    def size(n: object) -> bool:
        return isinstance(n, int) and not isinstance(n, bool) and n >= 1

    rows = [] if size(devices) else [f"devices: {is_a(devices)}, not a number of devices"]
    if isinstance(axes, str) or not axes or len(set(axes)) < len(axes):
        rows.append(f"axes: {axes!r}, not names of different mesh axes, such as ('data', 'model')")
    if isinstance(microbatches, int | str) or not microbatches or not all(map(size, microbatches)):
        rows.append(f"microbatches: {microbatches!r}, not numbers to try, such as (1, 4, 8)")
    if isinstance(step, Program) and args:
        rows.append(f"args: {len(args)} beside a program, which has its own")
    if rows:
        raise ArgumentError(faults("arguments of search that do not fit:", rows))
