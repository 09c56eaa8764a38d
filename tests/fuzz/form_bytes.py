"""Random static forms, planned with their dims split, and what their plans send beside the least possible.

A program is one of the blocks of ``tests.fuzz.forms`` on an array that is split over the mesh, or the gradient of a
loss of it. Links cost bytes and nothing else, so a plan that sends more than the least (``tests.fuzz.least_bytes``)
lacks a strategy.

JAX_NUM_CPU_DEVICES=8 python -m tests.fuzz.form_bytes --cases 300 --seed 7
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from statistics import median

import numpy as np

import meshdsl as md
from meshdsl.layouts.topology import Link, Topology
from tests.fuzz.forms import FORMS
from tests.fuzz.generator import Case
from tests.fuzz.least_bytes import least_bytes
from tests.fuzz.writer import Writer

BYTES_ALONE = Topology("bytes alone", 1e15, 1e15, 1e13, 4e9, 0.0, (Link(0.0, 1e6),))
MESHES = ("x=8", "x=4", "x=2,y=2", "x=4,y=2", "x=3", "x=2,y=3")
SHAPES = ((32,), (64,), (54,), (32, 4), (16, 16), (4, 32), (24, 8), (27, 3), (4, 16, 4), (16, 8, 2), (12, 9, 2))
LARGEST = 2048  # elements of all inputs: the Jacobian has as many columns
FACTOR, SLACK = 3.0, 64  # of the least, and bytes above it, that a plan may send
# Forms of which no program sends much more than the least; of the others, some programs still do.
NEAR_THE_LEAST = frozenset("boundary difference rolled shifted_pair stencil stencil_in_two_dims".split())


@dataclass(frozen=True)
class FormBytes:
    """A program of one form; planned and least bytes per device."""

    seed: int
    form: str
    case: Case
    mesh: md.Mesh
    planned: int
    least: int

    @property
    def ratio(self) -> float:
        """Planned over least; below one number, it does not matter."""
        return max(self.planned, 4) / max(self.least, 4)

    @property
    def high(self) -> bool:
        """Whether the plan sends more than the allowed multiple of the least."""
        return self.planned > max(FACTOR * self.least, self.least + SLACK)

    def __str__(self) -> str:
        return f"seed {self.seed}, {self.form} on {self.mesh}: {self.planned} bytes, least {self.least}\n{self.case}\n"


def form_bytes(seed: int) -> FormBytes | None:
    """Returns what one seed draws, planned; None if that is no program of floats."""
    rng = np.random.default_rng(seed)
    mesh = md.Mesh.parse(str(rng.choice(MESHES)), topology=BYTES_ALONE)
    form, shape, gradient = FORMS[rng.integers(len(FORMS))], SHAPES[rng.integers(len(SHAPES))], rng.integers(3) == 0
    dims = rng.permutation(np.repeat(range(len(shape)), 2))  # that the axes split
    w = Writer(lambda below: int(rng.integers(below)), shape, mesh, bool(gradient))
    w.input(shape, "reals")
    form(w)
    made = w.values[-1]
    if not w.lines or made.dtype != "float32" or sum(prod(i.value.shape) for i in w.inputs) > LARGEST:
        return None
    layouts = {i.value.name: _layout(i.value.shape, mesh, dims) for i in w.inputs}
    kept = not gradient and _layout(made.shape, mesh, dims) == _layout(shape, mesh, dims)
    source = _kept(w, made.name) if kept else _loss(w, made.name, bool(gradient))
    outputs = {"**": _layout(made.shape, mesh, dims)} if kept else {}
    case = Case(source, tuple(w.inputs), {name: pin for name, pin in layouts.items() if pin}, (form.__name__,))
    plan = md.parallelize(case.step, mesh, case.pins, outputs={k: v for k, v in outputs.items() if v}).plan(
        *case.args()
    )
    return FormBytes(seed, form.__name__, case, mesh, int(plan.bytes), least_bytes(case.step, case.args(), plan))


def _layout(shape: Sequence[int], mesh: md.Mesh, dims: Sequence[int]) -> str:
    """Returns the layout that splits a dim over each axis, where it divides."""
    blocks, placed = [1] * len(shape), []
    for axis, d in zip(mesh.names, dims, strict=False):
        if d < len(shape) and shape[d] % (blocks[d] * mesh.axis(axis)) == 0:
            blocks[d] *= mesh.axis(axis)
            placed.append(f"{axis}=S({d})")
    return " ".join(placed)


def _kept(w: Writer, result: str) -> str:
    return "\n    ".join([f"def step({_names(w)}):", *w.lines, f"return {result}"])


def _loss(w: Writer, result: str, gradient: bool) -> str:
    """A mean of squares, or its gradient by all floats; a length that does not divide stays inside the step."""
    floats = tuple(n for n, given in enumerate(w.inputs) if given.value.dtype == "float32")
    names = _names(w)
    loss = "\n        ".join([f"def loss({names}):", *w.lines, f"return jnp.mean(jnp.square({result}))"])
    returned = f"jax.grad(loss, {floats})({names})" if gradient else f"loss({names})"
    return "\n    ".join([f"def step({names}):", loss, f"return {returned}"])


def _names(w: Writer) -> str:
    return ", ".join(given.value.name for given in w.inputs)


def report(found: Sequence[FormBytes]) -> str:
    """Returns a line per form: how many programs, the median and the largest ratio, how many send too much."""
    rows = []
    for name in sorted({one.form for one in found}):
        of_form = [one for one in found if one.form == name]
        ratios, high = [one.ratio for one in of_form], sum(one.high for one in of_form)
        said = f"{len(of_form):4} programs, median {median(ratios):5.1f}, largest {max(ratios):6.1f}, {high} too much"
        rows.append(f"{name:24} {said}")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=300, help="how many seeds")
    parser.add_argument("--seed", type=int, default=0, help="the first")
    asked = parser.parse_args()
    found: list[FormBytes] = []
    for seed in range(asked.seed, asked.seed + asked.cases):
        one = form_bytes(seed)
        if one is not None:
            found.append(one)
            if one.high:
                print(one, flush=True)
    print(report(found))
    sys.exit(any(one.high and one.form in NEAR_THE_LEAST for one in found))


if __name__ == "__main__":
    main()
