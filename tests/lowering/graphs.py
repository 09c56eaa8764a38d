"""Small programs and hand-made solutions, so that lowering is tested without tracer or planner."""

from dataclasses import dataclass
from itertools import count

import jax
from jax.extend.core import Literal as JaxLiteral

from meshdsl.ir.check import check_graph
from meshdsl.ir.graph import Graph, Leaf, Literal, Op, TracedProgram, Value, walk
from meshdsl.ir.solution import Solution
from meshdsl.layouts.collective_cost import COLLECTIVES
from meshdsl.layouts.layout import Layout
from meshdsl.layouts.placement import B, P, S, Split
from meshdsl.layouts.reshard import arrange, complete, reshard
from meshdsl.lowering.hlo.collectives import compiled_collectives
from meshdsl.lowering.verify import compare, equal_or_error

INLINED = {"jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr", "custom_jvp_call": "call_jaxpr"}
LINEAR = ("add", "sub", "add_any", "neg", "convert_element_type", "copy")


def verify_text(planned, text, mesh):
    """The report on planned collectives and compiled HLO text; VerifyError if they differ."""
    return equal_or_error(compare(planned, compiled_collectives(text, mesh), mesh), "compiled")


def program_of(step, *args):
    """The program of ``step``, calls inlined, loops kept; outputs flat."""
    ids = count(1)
    closed = jax.make_jaxpr(step)(*args)
    graph = _graph(closed.jaxpr, ids, 1, False)
    check_graph(graph)
    leaves = [tuple(Leaf(f"{i}", v.shape, v.dtype) for i, v in enumerate(vs)) for vs in (graph.inputs, graph.returned)]
    return TracedProgram(graph, *leaves)


def _graph(jaxpr, ids, trips, estimated):
    env, ops = {}, []
    inputs = tuple(_value(v, env, ids) for v in jaxpr.invars)
    for eqn in jaxpr.eqns:
        _equation(eqn, env, ops, ids, trips, estimated)
    ops.append(Op(next(ids), "return", None, {}, tuple(_read(v, env) for v in jaxpr.outvars), ()))
    return Graph(inputs, tuple(ops), trips, estimated)


def _equation(eqn, env, ops, ids, trips, estimated):
    name, params = eqn.primitive.name, dict(eqn.params)
    inputs = tuple(_read(v, env) for v in eqn.invars)
    if name in INLINED:
        inner = params[INLINED[name]].jaxpr
        within = dict(zip(inner.invars, inputs, strict=True))
        for e in inner.eqns:
            _equation(e, within, ops, ids, trips, estimated)
        env.update(zip(eqn.outvars, (_read(v, within) for v in inner.outvars), strict=True))
        return
    bodies = tuple(_graph(j, ids, t, e) for j, t, e in _bodies(name, params, trips, estimated))
    outputs = tuple(_value(v, env, ids) for v in eqn.outvars)
    if "ft_in" in params:
        params["num_consts"], params["num_carry"] = map(len, params["ft_in"].unpack()[:2])
    ops.append(Op(next(ids), name, eqn.primitive, params, inputs, outputs, bodies=bodies))


def _bodies(name, params, trips, estimated):
    if name == "scan":
        return [(params["jaxpr"].jaxpr, trips * params["length"], estimated)]
    if name == "while":
        return [(params[k].jaxpr, trips, True) for k in ("cond_jaxpr", "body_jaxpr")]
    return [(branch.jaxpr, trips, estimated) for branch in params["branches"]] if name == "cond" else []


def _value(var, env, ids):
    env[var] = Value(next(ids), var.aval.shape, var.aval.dtype)
    return env[var]


def _read(x, env):
    return Literal(x.val, x.aval.shape, x.aval.dtype) if isinstance(x, JaxLiteral) else env[x]


@dataclass
class Planned:
    kind: str
    axes: tuple[str, ...]
    bytes: int
    trips: int


def planned(program, solution):
    """Every collective of the solution's trees, with the trips of the graph it stands in."""
    found = []
    for graph in {id(g): g for g, _ in walk(program.graph)}.values():
        values = [*graph.inputs, *(v for op in graph.ops for v in op.outputs)]
        moves = [m for v in values for m in solution.trees.get(v.id, ()) if m.kind in COLLECTIVES]
        found += [Planned(m.kind, m.axes, m.bytes, graph.trips) for m in moves]
    return found


class Hand:
    """A greedy solution: inputs as given, each operation follows its operands.

    Args:
      carries: per scan, while in order of appearance: the layouts of its carry.
      reads: layouts by (operation name, operand index), instead of the one the operand has.
    """

    def __init__(self, mesh, carries=(), reads=None):
        self.mesh, self.carries, self.reads = mesh, list(carries), reads or {}
        self.layouts, self.uses, self.trees = {}, {}, {}

    def solve(self, program, inputs, outputs):
        self._graph(program.graph, map(self._full, inputs), map(self._full, outputs))
        return Solution(self.mesh, {}, self.layouts, self.uses, self.trees, 0.0, 0.0, 0, 0)

    def _full(self, layout):
        return complete(Layout.parse(layout) if isinstance(layout, str) else layout, self.mesh)

    def _graph(self, graph, inputs, outputs):
        for value, layout in zip(graph.inputs, inputs, strict=True):
            self.layouts[value.id] = layout
        for op in graph.ops[:-1]:
            self._op(op)
        outputs = list(outputs) if outputs is not None else [self._held(x) for x in graph.returned]
        for i, layout in enumerate(outputs):
            self._use(graph.ops[-1], i, layout)

    def _op(self, op):
        for i, x in enumerate(op.inputs):
            if isinstance(x, Value) and (op.name, i) in self.reads:
                self._use(op, i, self._full(self.reads[op.name, i]))
        structured = {"scan": self._scan, "while": self._while, "cond": self._cond}
        if op.name in structured:
            structured[op.name](op)
            return
        rows = [
            ONE_AXIS.get(op.name, elementwise)(op, [self._on(op, i, a) for i in range(len(op.inputs))])
            for a in self.mesh.names
        ]
        for i in range(len(op.inputs)):
            self._use(op, i, self._layout([row[0][i] for row in rows]))
        for j, value in enumerate(op.outputs):
            self.layouts[value.id] = self._layout([row[1][j] for row in rows])

    def _scan(self, op):
        consts, carries = op.params["num_consts"], op.params["num_carry"]
        ports = [self._held(x) if (op.id, i) not in self.uses else self.uses[op.id, i] for i, x in enumerate(op.inputs)]
        ports[consts : consts + carries] = carry = [self._full(c) for c in self.carries.pop(0)]
        for i, layout in enumerate(ports):
            self._use(op, i, layout)
        slices = [_shift(layout, -1) for layout in ports[consts + carries :]]
        body = op.bodies[0]
        self._graph(body, [*ports[: consts + carries], *slices], None)
        for i, layout in enumerate(carry):
            self._use(body.ops[-1], i, layout)
        ys = [_shift(self.uses[body.ops[-1].id, i], 1) for i in range(carries, len(body.returned))]
        self.layouts.update((v.id, x) for v, x in zip(op.outputs, [*carry, *ys], strict=True))

    def _while(self, op):
        split, start = op.params["cond_nconsts"], op.params["cond_nconsts"] + op.params["body_nconsts"]
        ports = [self._held(x) for x in op.inputs]
        ports[start:] = carry = [self._full(c) for c in self.carries.pop(0)]
        for i, layout in enumerate(ports):
            self._use(op, i, layout)
        self._graph(op.bodies[0], [*ports[:split], *carry], [self._full("")])
        self._graph(op.bodies[1], ports[split:], carry)
        self.layouts.update((v.id, x) for v, x in zip(op.outputs, carry, strict=True))

    def _cond(self, op):
        ports = [self._held(x) for x in op.inputs]
        for i, layout in enumerate([self._full(""), *ports[1:]]):
            self._use(op, i, layout)
        results = [self._full("")] * len(op.outputs)
        for body in op.bodies:
            self._graph(body, ports[1:], results)
        self.layouts.update((v.id, x) for v, x in zip(op.outputs, results, strict=True))

    def _held(self, x):
        return self.layouts[x.id] if isinstance(x, Value) else self._full("")

    def _on(self, op, i, axis):
        return self.uses.get((op.id, i), self._held(op.inputs[i])).on(axis)

    def _layout(self, placements):
        return arrange(self.mesh, dict(zip(self.mesh.names, placements, strict=True)))

    def _use(self, op, i, layout):
        value = op.inputs[i]
        if isinstance(value, Literal):
            return
        self.uses[op.id, i] = layout
        tree = self.trees.get(value.id, ())
        made = {self.layouts[value.id], *(move.after for move in tree)}
        if layout not in made:
            path = reshard(self.layouts[value.id], layout, value.shape, value.itemsize, self.mesh)
            self.trees[value.id] = (*tree, *(move for move in path if move.after not in made))


def _shift(layout, by):
    return Layout(**{n: S(p.dim + by) if isinstance(p, Split) else p for n, p in layout.placements})


def elementwise(op, placed):
    """All operands split alike, or partial where the operation is linear, or whole."""
    wide = [i for i, x in enumerate(op.inputs) if isinstance(x, Value) and x.shape == op.outputs[0].shape]
    split = next((placed[i] for i in wide if isinstance(placed[i], Split)), None)
    linear = op.name in LINEAR or (op.name == "mul" and len(wide) == 1)
    if split is None and wide and linear and all(placed[i] is P for i in wide):
        split = P
    return [split or B if i in wide else B for i in range(len(placed))], [split or B]


def dot_general(op, placed):
    """One axis of a product: batch, free or contracted dim; a contracted one gives a partial sum."""
    (lc, rc), (lb, rb) = op.params["dimension_numbers"]
    left, right = op.inputs
    free_left = [d for d in range(len(left.shape)) if d not in (*lc, *lb)]
    free_right = [d for d in range(len(right.shape)) if d not in (*rc, *rb)]
    a, b = placed
    for l, r in zip(lc, rc, strict=True):
        if a is S(l) or (b is S(r) and not isinstance(a, Split)):
            return [S(l), S(r)], [P]
    for k, (l, r) in enumerate(zip(lb, rb, strict=True)):
        if a is S(l) or b is S(r):
            return [S(l), S(r)], [S(k)]
    if isinstance(a, Split):
        return [a, B], [S(len(lb) + free_left.index(a.dim))]
    if isinstance(b, Split):
        return [B, b], [S(len(lb) + len(free_left) + free_right.index(b.dim))]
    return [B, B], [B]


def reduce_sum(op, placed):
    (x,) = placed
    axes = op.params["axes"]
    if isinstance(x, Split):
        return [x], [P if x.dim in axes else S(x.dim - sum(d < x.dim for d in axes))]
    return [x], [x]


def transpose(op, placed):
    (x,) = placed
    return [x], [S(op.params["permutation"].index(x.dim)) if isinstance(x, Split) else x]


def whole(op, placed):
    return [B] * len(placed), [B] * len(op.outputs)


ONE_AXIS = {"dot_general": dot_general, "reduce_sum": reduce_sum, "transpose": transpose} | dict.fromkeys(
    ("reduce_max", "broadcast_in_dim", "reshape", "iota"), whole
)
