"""Random cases: a step as text, its arguments, pins that divide. Hypothesis draws them, so failures shrink."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from hypothesis import strategies as st

import meshdsl as md
from meshdsl.layouts.topology import Link, Topology
from tests.fuzz import forms, positions, shaping, sums, whole  # noqa: F401  each registers its blocks
from tests.fuzz.loops import grow
from tests.fuzz.pins import input_pins
from tests.fuzz.writer import NAMES, Draw, Input, Value, Writer

MESHES = ("x=8", "x=4,y=2", "x=2,y=2,z=2", "x=2,y=4", "x=4", "x=2", "x=3,y=2", "x=2,y=3", "x=5", "x=2,y=1,z=3")
SLOW_LINKS = Topology("slow links", 1e10, 1e10, 4e9, 4e9, 0.0, (Link(1e-6, 1e6),), beside_products=True)
SLOW_DEVICES = Topology("slow devices", 1e5, 1e5, 1e5, 4e9, 0.0, (Link(0.0, 1e9),))
BALANCED = Topology("balanced", 1e8, 1e8, 1e8, 4e9, 1e-7, (Link(1e-6, 1e8, 2), Link(2e-6, 2e7)), merges=1e9)
TOPOLOGIES = (SLOW_LINKS, SLOW_DEVICES, BALANCED)
SIZES = (2, 3, 4, 5, 6, 8, 10, 12, 16, 17, 25)


@dataclass(frozen=True)
class Case:
    """A step with arguments and pins, and the names of the blocks that it was made of."""

    source: str
    inputs: tuple[Input, ...]
    pins: dict[str, str]
    blocks: tuple[str, ...]

    @cached_property
    def step(self) -> Any:
        names = dict(NAMES)
        exec(compile(self.source, "program", "exec"), names)
        return names["step"]

    def args(self) -> list[Any]:
        return [given.array() for given in self.inputs]

    def __str__(self) -> str:
        kinds = [f"{i.value.name} {i.value.dtype}{list(i.value.shape)} {i.holds}" for i in self.inputs]
        return f"{self.source}\n\n# {', '.join(kinds)}\n# layouts={self.pins}"


@dataclass(frozen=True)
class Batch:
    """Cases that are compiled together; with a ``seed`` under a plan drawn at random, else under the planner's.

    Args:
      prefetch: loops send ahead and behind all that they can.
      rings: all products run in parts that can.
    """

    mesh: md.Mesh
    cases: tuple[Case, ...]
    seed: int | None
    prefetch: bool = False
    rings: bool = False

    def __str__(self) -> str:
        how = "the planner's plan" if self.seed is None else f"a random plan, seed {self.seed}"
        how += (", prefetched" if self.prefetch else "") + (", with rings" if self.rings else "")
        head = f"mesh {self.mesh}, topology {self.mesh.topology.name}, {how}"
        return "\n\n".join([head, *map(str, self.cases)])


@st.composite
def batches(draw: Any, largest: int) -> Batch:
    """Up to so many cases on one mesh, about half of that on average."""
    sizes = draw(st.sampled_from(MESHES))
    apart = sizes.endswith("=3")  # two of which lie partly behind one link of two
    mesh = md.Mesh.parse(sizes, topology=draw(st.sampled_from(TOPOLOGIES[:2] if apart else TOPOLOGIES)))
    seed = draw(st.none() | st.integers(0, 2**16))
    drawn = tuple(draw(st.lists(cases(mesh), min_size=1, max_size=largest)))
    return Batch(mesh, drawn, seed, prefetch=draw(st.booleans()), rings=draw(st.booleans()))


@st.composite
def cases(draw: Any, mesh: md.Mesh) -> Case:
    """A case for this mesh."""

    def number(below: int) -> int:
        return int(draw(st.integers(0, below - 1)))

    writer = Writer(number, _dims(number, mesh), mesh, differentiable=number(2) == 1)
    returned = _gradient_step(writer) if writer.differentiable else _plain_step(writer)
    names = ", ".join(given.value.name for given in writer.inputs)
    lines = [f"def step({names}):", *(f"    {line}" for line in (*writer.lines, f"return {returned}"))]
    return Case("\n".join(lines), tuple(writer.inputs), input_pins(writer), tuple(writer.blocks))


def _dims(number: Draw, mesh: md.Mesh) -> tuple[int, ...]:
    """Two or three lengths, so that operands fit each other; most of them can be split."""
    even = [n for n in SIZES if all(n % size == 0 for size in mesh.sizes)]
    some = [n for n in SIZES if n % mesh.sizes[0] == 0]
    return tuple(pool[number(len(pool))] for pool in (even, even, some, SIZES)[number(2) :])


def _plain_step(w: Writer) -> str:
    """A forward step; returns its results."""
    grow(w, 1, 4)
    return _results(w, w.values)


def _results(w: Writer, values: list[Value]) -> str:
    """What nothing else reads, without keys."""
    inputs = {given.value.name for given in w.inputs}
    ends = [v.name for v in values if v.name not in inputs | w.used and v.dtype != "key"]
    return ", ".join(ends or [f"{v} + 0" for v in values[:1] if v.dtype != "key"] or ["jnp.zeros(2)"])


def _gradient_step(w: Writer) -> str:
    """A training step: a loss, and every float argument moved against its gradient; returns its results."""
    inside = w.inner()
    grow(inside, 1, 3)
    losses = [
        f"jnp.mean(jnp.square({v}).astype(jnp.float32))"
        for v in inside.values[-2:]
        if v.dtype in ("float32", "bfloat16")
    ]
    weights = [i.value.name for i in w.inputs if i.value.dtype in ("float32", "bfloat16")]
    if not losses or not weights:
        w.lines += inside.lines
        return _results(w, inside.values or w.values)
    inside.lines.append(f"total = {' + '.join(losses)}")
    w.function("loss", weights, inside, f"total, ({_results(w, inside.values)},)")
    numbers = tuple(range(len(weights)))
    w.lines.append(f"(total, rest), grads = jax.value_and_grad(loss, {numbers}, has_aux=True)({', '.join(weights)})")
    moved = [f"{name} - (0.1 * grads[{n}]).astype({name}.dtype)" for n, name in enumerate(weights)]
    return f"{', '.join(moved)}, total, rest"
