"""Small programs and solutions written by hand, for tests of what lies between trace and lowering."""

import numpy as np

from meshdsl.ir.graph import Graph, Leaf, Op, Source, TracedProgram, Value
from meshdsl.ir.solution import Solution
from meshdsl.layouts import B, Layout, Link, Mesh, P, S, Topology
from meshdsl.layouts.reshard import complete, reshard
from meshdsl.layouts.sharding_rule import Signature
from meshdsl.pins import make_pins
from meshdsl.plan import build_plan

F32 = np.dtype("float32")
TOPOLOGY = Topology("test", 5e9, 1e10, 2e9, 4e9, 2e-6, (Link(1.5e-4, 5e8),))
MESH = Mesh(topology=TOPOLOGY, data=4, model=2)


def leaf(path, *shape, dtype=F32):
    return Leaf(path, shape, dtype)


def boundary(inputs, outputs, ops=()):
    """A program of which only the boundary matters: it returns fresh values."""
    made = [Value(100 + i, x.shape, x.dtype) for i, x in enumerate(outputs)]
    taken = tuple(Value(i, x.shape, x.dtype) for i, x in enumerate(inputs))
    fresh = [Op(i, "fresh", None, {}, (), (v,)) for i, v in enumerate(made)]
    last = Op(99, "return", None, {}, tuple(made), ())
    return TracedProgram(Graph(taken, (*fresh, *ops, last)), tuple(inputs), tuple(outputs))


def line(number):
    return Source("/home/someone/model.py", number, "loss")


def small_program():
    """``y = x @ w; s = sum(y); w2 = update(w, s)``: three operations, one without a rule."""
    w, x, y = Value(0, (8, 16), F32), Value(1, (32, 8), F32), Value(2, (32, 16), F32)
    s, w2 = Value(3, (), F32), Value(4, (8, 16), F32)
    ops = (
        Op(0, "dot_general", None, {"dimension_numbers": (((1,), (0,)), ((), ()))}, (x, w), (y,), line(31)),
        Op(1, "reduce_sum", None, {}, (y,), (s,), line(32)),
        Op(2, "unheard_of", None, {}, (w, s), (w2,), line(33), "optimizer"),
        Op(3, "return", None, {}, (w2, s), ()),
    )
    inputs = (leaf("w", 8, 16), leaf("batch/x", 32, 8))
    return TracedProgram(Graph((w, x), ops), inputs, (leaf("0", 8, 16), leaf("1")))


def small_solution(mesh=MESH):
    """Data parallel, with ``w`` split over its columns: one gather, one reduction."""
    cols, rows, whole, part = (complete(Layout.parse(t), mesh) for t in ("data=S(1)", "data=S(0)", "", "data=P"))
    return Solution(
        mesh=mesh,
        rows={
            0: (Signature((S(0), B), (S(0),)), Signature((B, B), (B,))),
            1: (Signature((S(0),), (P,)), Signature((B,), (B,))),
            2: (Signature((B, B), (B,)),) * 2,
        },
        layouts={0: cols, 1: rows, 2: rows, 3: part, 4: whole},
        uses={(0, 0): rows, (0, 1): whole, (1, 0): rows, (2, 0): whole, (2, 1): whole, (3, 0): cols, (3, 1): whole},
        trees={
            0: reshard(cols, whole, (8, 16), 4, mesh),
            3: reshard(part, whole, (), 4, mesh),
            4: reshard(whole, cols, (8, 16), 4, mesh),
        },
        seconds=2e-3,
        lower_bound=1.9e-3,
        peak=1234,
        peak_op=1,
        held=((0, 512), (2, 64)),
    )


def small_plan():
    program = small_program()
    return build_plan(program, small_solution(), make_pins(program, MESH, {"batch/**": "data=S(0)"}))
