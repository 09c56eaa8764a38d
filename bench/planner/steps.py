"""Step times of our plans, of other methods' plans, and of the XLA partitioner, on 8 virtual CPU devices.

A model of every family at the sizes of ``bench/memory.py`` on ``data=4,model=2``, the batch pinned to ``data``, with
costs measured by ``calibrate`` in the same process. All programs take equal arguments in the layouts of their own plan;
the XLA partitioner uses the input and output layouts of ours. Nothing is donated, so that a step can be repeated.
"""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from bench.example_steps import random_array
from bench.memory import FAMILIES
from bench.peers import partitioned
from bench.planner.peers import axis_by_axis, by_names, greedy
from bench.report import interleave, ratio
from bench.step import bytes_sent
from meshdsl.api import Program
from meshdsl.api.executable import Executable
from meshdsl.calibrate import calibrate
from meshdsl.layouts.axis_rules import Rules
from meshdsl.layouts.mesh import Mesh
from meshdsl.lowering.shardings import device_mesh
from meshdsl.pins import make_pins
from meshdsl.plan import Plan
from meshdsl.plan.build import build_plan
from meshdsl.planner.memory.fit import PeakCache
from meshdsl.planner.objective import CostedPlan, Evaluator
from meshdsl.planner.problem.build import make_problem
from meshdsl.planner.problem.model import Model
from meshdsl.planner.search.search import search
from meshdsl.planner.solve import solution_of
from meshdsl.trace import trace

PEERS: dict[str, Callable[[Model], CostedPlan]] = {"greedy": greedy, "names": by_names, "axis": axis_by_axis}
SHAPE = Mesh(data=4, model=2)
ROUNDS = 10


def steps() -> Iterator[dict[str, Any]]:
    """Yields a row per model: seconds and bytes of our step; ratio, interval and bytes of each other one."""
    mesh = Mesh(topology=calibrate(SHAPE), **dict(SHAPE))
    for name, (module, program) in FAMILIES.items():
        if "remat" not in name:
            yield {"name": name, **_timed(program(module.RULES["data"]), mesh)}
            jax.clear_caches()


def _timed(program: Program, mesh: Mesh) -> dict[str, Any]:
    plans = plans_of(program, mesh)
    devices, leaves = device_mesh(mesh), [random_array(x) for x in jax.tree.leaves(program.args)]
    runs = {who: _run(Executable(traced, plan, devices), leaves) for who, (traced, plan) in plans.items()}
    sent: dict[str, float] = {who: plan.bytes for who, (_, plan) in plans.items()}
    runs["xla"], sent["xla"] = _by_xla(program, plans["ours"][1], mesh, leaves)
    seconds = interleave(runs, ROUNDS)
    row: dict[str, Any] = {"ours": [float(np.median(seconds["ours"])), sent["ours"], plans["ours"][1].seconds]}
    for who in runs.keys() - {"ours"}:
        times = ratio(seconds[who], seconds["ours"])
        predicted = plans[who][1].seconds / plans["ours"][1].seconds if who in plans else None
        row[who] = [times.median, times.low, times.high, sent[who], predicted]
    return row


def plans_of(program: Program, mesh: Mesh) -> dict[str, tuple[Any, Plan]]:
    """Returns the traced program and its plan, by method."""
    traced = trace(program.step, program.args)
    pins = make_pins(traced, mesh, rules=Rules.of(program.rules))
    model = Model(make_problem(traced, mesh, pins))
    ours = search(model).plan
    choices = {"ours": ours, **{who: choose(model) for who, choose in PEERS.items()}}
    cache = PeakCache(Evaluator(model), pins.donated)
    peaks = {who: cache.peak(choice) for who, choice in choices.items()}
    solutions = {who: solution_of(model, pins, choice, peaks[who]) for who, choice in choices.items()}
    return {who: (traced, build_plan(traced, solution, pins)) for who, solution in solutions.items()}


def _run(executable: Executable, leaves: list[Any]) -> Callable[[], Any]:
    placed, call = executable.copies(leaves), executable.call
    return lambda: call(*placed)


def _by_xla(program: Program, plan: Plan, mesh: Mesh, leaves: list[Any]) -> tuple[Callable[[], Any], float]:
    jitted, shardings = partitioned(program, device_mesh(mesh), plan, donate=False)
    args = jax.device_put(jax.tree.unflatten(jax.tree.structure(program.args), leaves), shardings)
    compiled = jitted.lower(*args).compile()
    return lambda: compiled(*args), bytes_sent(compiled.as_text(), mesh)
