"""Small steps, their planning problems, and exhaustive search over all joint states."""

from copy import copy
from dataclasses import replace
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np

from meshdsl.ir.solution import Pins
from meshdsl.layouts import Layout, Mesh
from meshdsl.layouts.topology import topology
from meshdsl.planner.memory.fit import MemoryFitter, joint_networks
from meshdsl.planner.objective import Evaluator
from meshdsl.planner.problem.build import make_problem
from meshdsl.planner.problem.model import Model
from meshdsl.planner.search.search import search
from meshdsl.planner.solve import solve
from meshdsl.trace import trace
from meshdsl.util.runtime import worker_pool

# An H100 whose programs fuse chains alone: operations take long beside collectives.
SLOW = {"fusion": "chains", "memory_bandwidth": 3e12, "overhead": 3e-6, "flops32": 4e14}
CHAINS = replace(topology("dgx-h100"), name="chains", **SLOW)


def shape(*dims, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(dims, dtype)


def matmul(a, b):
    return a @ b


def two_layers(a, b):
    return jnp.tanh(a @ b) @ b.T


def shared(a, b):
    c = a @ b
    return c @ b.T, jnp.sum(c, axis=0)


def gradient(w, x):
    return w - jax.grad(lambda w: jnp.sum((x @ w) ** 2))(w)


def looped(w, x):
    return jax.lax.scan(lambda c, _: (c @ w, None), x, None, length=3)[0]


# name -> step, arguments, pins of the inputs
STEPS = {
    "matmul": (matmul, (shape(64, 32), shape(32, 16)), ("x=S(0)", "")),
    "two layers": (two_layers, (shape(64, 32), shape(32, 16)), ("x=S(0)", "y=S(1)")),
    "shared": (shared, (shape(64, 32), shape(32, 16)), ("x=S(1)", "x=S(0)")),
    "gradient": (gradient, (shape(32, 16), shape(64, 32)), ("", "x=S(0)")),
    "looped": (looped, (shape(16, 16), shape(64, 16)), ("x=S(0)", "x=S(0)")),
}


def problem_of(name, mesh):
    """The model of a step; its first output follows its first input in "gradient"."""
    step, args, pins = STEPS[name]
    program = trace(step, args)
    follows = tuple(0 if name == "gradient" and j == 0 else None for j in range(len(program.outputs)))
    outputs = tuple(Layout() for _ in program.outputs)
    return Model(make_problem(program, mesh, Pins(tuple(map(Layout.parse, pins)), outputs, follows)))


def limited(model, **limits):
    """The model with some of its search limits changed."""
    other = copy(model)
    other.limits = replace(model.limits, **limits)
    return other


def fitter_of(model, pins):
    """The memory fitter of a model, with its networks."""
    return MemoryFitter(model, pins, joint_networks(model))


def solved(program, mesh, pins, memory=None):
    """Returns the certified solution of a program, by the stages that ``parallelize`` runs."""
    with worker_pool() as submit:
        return solve(program, mesh, pins, memory).polish(submit).solution()


def searched(model, **given):
    """The best plan found, and seconds that no plan undercuts."""
    found = search(model, **given)
    return found.plan, found.lower_bound()


def exhaustive(model, largest=400_000):
    """The least cost over every joint state of every node; None if there are too many."""
    states = [np.argwhere(np.isfinite(model.unary[n])) for n in range(len(model.nodes))]
    if np.prod([float(len(s)) for s in states]) > largest:
        return None
    evaluator = Evaluator(model)
    return min(evaluator.evaluate(np.array(rows)).cost for rows in product(*states))


ONE, TWO = Mesh(x=4), Mesh(x=2, y=2)


def minimum(network, fixed):
    """The least cost of a network with the states of its first variables given."""
    for v, state in enumerate(fixed):
        network.unary[v] = network.unary[v][[state]]
        for w, table in network.pairwise[v].items():
            network.pairwise[v][w] = table[[state]]
            network.pairwise[w][v] = network.pairwise[v][w].T
    network.reduce(10**9)
    assert not network.unary
    return network.constant


def layout_of(model, n, port, state):
    """The layout of a node's port in a joint state."""
    space = model.reshard_costs[model.nodes[n].ports[port].value.id].space
    return space.layouts[int(model.layout_numbers(n, port, state))]
