"""Reading a jaxpr: equations become operations, calls are inlined, closed-over arrays explicit.

    env = inputs
    for eqn in jaxpr:
        operands = read(eqn)
        env += the reader of its primitive:  a call is inlined,
                                             the bodies of a loop become graphs of their own,
                                             a composite primitive is inlined as the JAX code that implements it,
                                             anything else becomes one operation

An array that a body closes over (a constant of its jaxpr, or of a call inlined into it) is passed to the loop as one
more const: a body sees nothing but its inputs.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count, repeat
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, jaxpr_as_fun
from jax.extend.core import Literal as JaxLiteral
from jax.lax import optimization_barrier_p
from jax.sharding import NamedSharding

from meshdsl.errors import TraceError
from meshdsl.ir.graph import Atom, Graph, Literal, Op, Value
from meshdsl.ir.loops import LoopPort, PortRole, loop_ports, with_ports
from meshdsl.ir.rewrite import broadcast_params
from meshdsl.primitives.constrain import constrain_p, stated_params
from meshdsl.rules import RULES
from meshdsl.shardings import DEVICE_KIND, stated_layout
from meshdsl.trace.composites import IMPLEMENTATIONS
from meshdsl.trace.platforms import PLATFORMS, branch_of
from meshdsl.trace.shardings import type_of_result, without_empty_types
from meshdsl.trace.source import SourceContext

# ---- Composite primitives --------------------------------------------------------------------------------------------
# A library can bind primitives of its own, to customise ``vmap`` or ``grad``, and so does JAX. Both transformations are
# over in a traced step, and the primitive's ``impl`` is mostly JAX code, or ``composites`` has some. So the equation is
# replaced by the equations of that function. A primitive whose ``impl`` cannot be traced (it compiles the primitive, or
# reads values, or calls out of JAX) stays one operation, and so does one that has a rule, or one of JAX that computes
# nothing: it states where an array is. Values that are known scalars may be read, such as the number by which
# equinox's ``noinline`` finds its function.


def written_out(eqn: JaxprEqn, inputs: Sequence[Atom]) -> ClosedJaxpr | None:
    """Returns the jaxpr of a composite primitive's implementation, or None if that is not JAX code."""
    primitive = eqn.primitive
    if primitive.name in RULES or has_effects(eqn) or _module(primitive.impl) == "meshdsl":
        return None
    implementation = IMPLEMENTATIONS.get(primitive.name, primitive.impl)
    run = partial(implementation, **primitive.get_bind_params(eqn.params))
    scalars = {i: x.value for i, x in enumerate(inputs) if isinstance(x, Literal)}
    found = _traced(run, eqn) or (scalars and _traced(_with_known(run, scalars), eqn))
    if not found:
        return None
    same = _types(found.jaxpr.outvars) == _types(eqn.outvars)
    if not same or found.effects or _binds(found.jaxpr, primitive):
        return None
    return None if _module(primitive.impl) == "jax" and _is_identity(found.jaxpr) else found


def _traced(function: Callable[..., Any], eqn: JaxprEqn) -> ClosedJaxpr | None:
    """Returns the jaxpr of a function of the equation's operands; None if it needs their values."""
    try:
        return jax.make_jaxpr(function)(*(jax.ShapeDtypeStruct(*t) for t in _types(eqn.invars)))
    except Exception:  # whatever foreign code raises on values it cannot read
        return None


def _with_known(function: Callable[..., Any], known: Mapping[int, Any]) -> Callable[..., Any]:
    """Returns the function with these operands in place of those that it is given."""
    return lambda *operands: function(*(known.get(i, x) for i, x in enumerate(operands)))


def _types(atoms: Iterable[Any]) -> list[tuple[Any, Any]]:
    return [(x.aval.shape, x.aval.dtype) for x in atoms]


def _module(implementation: Callable[..., Any]) -> str:
    """Returns the package that a function is from."""
    while isinstance(implementation, partial):
        implementation = implementation.func
    return str(getattr(implementation, "__module__", "")).partition(".")[0]


def _is_identity(jaxpr: Jaxpr) -> bool:
    """Whether a jaxpr returns its inputs, at most through calls that do."""
    same: dict[Any, Any] = {}
    for eqn in jaxpr.eqns:
        called = list(inner_jaxprs(eqn))
        if len(called) != 1 or not _is_identity(called[0]):
            return False
        read = [x if isinstance(x, JaxLiteral) else same.get(x, x) for x in eqn.invars]
        same.update(zip(eqn.outvars, read, strict=True))
    return [x if isinstance(x, JaxLiteral) else same.get(x, x) for x in jaxpr.outvars] == list(jaxpr.invars)


def _binds(jaxpr: Jaxpr, primitive: Any) -> bool:
    """Whether a jaxpr binds the primitive, at any depth."""
    return any(eqn.primitive is primitive or any(_binds(j, primitive) for j in inner_jaxprs(eqn)) for eqn in jaxpr.eqns)


def inner_jaxprs(eqn: JaxprEqn) -> Iterator[Jaxpr]:
    """Returns the jaxprs that an equation calls."""
    for x in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda x: isinstance(x, ClosedJaxpr | Jaxpr)):
        if isinstance(x, ClosedJaxpr | Jaxpr):
            yield x.jaxpr if isinstance(x, ClosedJaxpr) else x


# ---- Equations -------------------------------------------------------------------------------------------------------


@dataclass
class Frame:
    """A graph under construction.

    Args:
      ids: ids for new values.
      body: the graph is a loop's body, so closed-over arrays become inputs.
      captured: these arrays and their inputs, by identity.
    """

    ids: Iterator[int]
    body: bool
    ops: list[Op] = field(default_factory=list)
    captured: dict[int, tuple[Any, Value]] = field(default_factory=dict)

    def value(self, like: Any) -> Value:
        """Returns a new value of the shape and dtype of ``like``."""
        return Value(next(self.ids), tuple(like.shape), like.dtype)

    def constant(self, array: Any) -> Atom:
        """Returns a closed-over array as a literal if it is a scalar, else as an operation or one more input."""
        concrete = not isinstance(array, jax.core.Tracer)
        if concrete and np.shape(array) == ():
            return literal(array, array.dtype if hasattr(array, "dtype") else np.result_type(array))
        if id(array) not in self.captured:
            value = self.value(array)
            self.captured[id(array)] = (array, value)
            if not self.body:
                kept = array if _opaque(array) else np.asarray(array)
                self.ops.append(Op(0, "constant", None, {"value": kept}, (), (value,)))
        return self.captured[id(array)][1]


class CallSite(NamedTuple):
    """An equation, its operands, its place in the program, and the frame that its operations are appended to."""

    frame: Frame
    place: SourceContext
    eqn: JaxprEqn
    inputs: tuple[Atom, ...]

    def op(self, name: str, inputs: Iterable[Atom], outputs: Iterable[Any], primitive: Any = None, **more: Any) -> Op:
        """An operation here, with one new value per variable or value in ``outputs`` as its results."""
        made = tuple([self.frame.value(getattr(v, "aval", v)) for v in outputs])
        place: dict[str, Any] = {
            "source": self.place.source,
            "scope": self.place.scope,
            "manual": self.place.manual_axes,
        }
        return Op(0, name, primitive, inputs=tuple(inputs), outputs=made, **place, **more)

    def emit(self, name: str, inputs: Iterable[Atom], outputs: Iterable[Any], **more: Any) -> tuple[Value, ...]:
        """Appends an operation to the frame and returns its results."""
        self.frame.ops.append(self.op(name, inputs, outputs, **more))
        return self.frame.ops[-1].outputs


Reader = Callable[[CallSite], Sequence[Atom]]
READERS: dict[str, Reader] = {}


def reader(*names: str) -> Callable[[Reader], Reader]:
    """Returns a decorator that registers the reader of equations of these primitives."""

    def register(read: Reader) -> Reader:
        READERS.update(dict.fromkeys(names, read))
        return read

    return register


def read_jaxpr(closed: ClosedJaxpr) -> Graph:
    """Returns the graph of a traced step, before any pass."""
    return read_graph(closed, Frame(count(), body=False), SourceContext())


def read_graph(closed: ClosedJaxpr, frame: Frame, place: SourceContext) -> Graph:
    """Returns a jaxpr as a graph, read into an empty frame; captured arrays are not among its inputs."""
    inputs = tuple(frame.value(v.aval) for v in closed.jaxpr.invars)
    returned = inline(closed, inputs, frame, place)
    end = Op(0, "return", None, {}, tuple(returned), (), place.source, scope=place.scope, manual=place.manual_axes)
    frame.ops.append(end)
    return Graph(inputs, tuple(frame.ops))


def inline(closed: ClosedJaxpr, inputs: Sequence[Atom], frame: Frame, place: SourceContext) -> list[Atom]:
    """Reads the equations of a jaxpr into ``frame`` and returns its results."""
    jaxpr = closed.jaxpr
    env: dict[Any, Atom] = dict(zip(jaxpr.constvars, map(frame.constant, closed.consts), strict=True))
    env.update(zip(jaxpr.invars, inputs, strict=True))

    def read(x: Any) -> Atom:
        return _read_literal(x, frame) if isinstance(x, JaxLiteral) else env[x]

    for eqn in jaxpr.eqns:
        site = CallSite(frame, place.at(eqn.source_info), eqn, tuple(map(read, eqn.invars)))
        results = READERS.get(eqn.primitive.name, _plain)(site)
        env.update(zip(eqn.outvars, results, strict=True))
    return [read(x) for x in jaxpr.outvars]


def written(
    function: Callable[..., Any], inputs: Sequence[Atom], ids: Iterator[int], like: Op
) -> tuple[list[Op], Atom]:
    """Returns the operations of a function with one result, at the place of ``like``, and the result."""
    frame = Frame(ids, body=False)
    made = jax.make_jaxpr(function)(*(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in inputs))
    (result,) = inline(made, inputs, frame, SourceContext())
    place: dict[str, Any] = {"source": like.source, "scope": like.scope, "manual": like.manual}
    return [replace(op, **place) for op in frame.ops], result


def closed(jaxpr: Any) -> ClosedJaxpr:
    """Returns a jaxpr with its constants; parameters of calls may be open or closed jaxprs."""
    return jaxpr if isinstance(jaxpr, ClosedJaxpr) else ClosedJaxpr(jaxpr, ())


def literal(value: Any, dtype: Any) -> Literal:
    """Returns a scalar of exactly this dtype."""
    return Literal(value if _opaque(value) else np.asarray(value, dtype)[()], (), dtype)


def _read_literal(x: Any, frame: Frame) -> Atom:
    return frame.constant(x.val) if np.shape(x.val) else literal(x.val, x.aval.dtype)


def _opaque(array: Any) -> bool:
    """Whether numpy cannot represent an array: random keys, and tracers of an enclosing transformation."""
    return isinstance(array, jax.core.Tracer) or (
        hasattr(array, "dtype") and jax.numpy.issubdtype(array.dtype, jax.dtypes.extended)
    )


def _plain(site: CallSite) -> Sequence[Atom]:
    eqn = site.eqn
    body = written_out(eqn, site.inputs)
    if body is not None:
        return inline(body, site.inputs, site.frame, site.place)
    name, more = eqn.primitive.name, {"primitive": eqn.primitive, "effects": has_effects(eqn)}
    params = without_empty_types(eqn.params)
    made = site.emit(name, site.inputs, eqn.outvars, params=_plain_numbers(params), **more)
    sharding = type_of_result(params)
    if not isinstance(sharding, NamedSharding):
        return made
    return [_constrained(site, x, sharding, f"{name}(out_sharding=)", is_type=True) for x in made]


def has_effects(eqn: JaxprEqn) -> bool:
    """Whether an equation does more than return its results; reading a mesh axis by name is no effect."""
    return any(type(effect).__name__ != "NamedAxisEffect" for effect in eqn.effects)


def _plain_numbers(x: Any) -> Any:
    """Parameters with numpy integers, which autodiff leaves in some, as Python integers."""
    if isinstance(x, dict):
        return {name: _plain_numbers(value) for name, value in x.items()}
    if type(x) is tuple:
        return tuple(map(_plain_numbers, x))
    return int(x) if isinstance(x, np.integer) else x


# ---- Loops and conditionals ------------------------------------------------------------------------------------------
# Equations that stay structured: their bodies become graphs of their own.
#
# The parameters get one spelling whatever the version of jax: ``num_consts`` and ``num_carry`` of a scan,
# ``cond_nconsts`` and ``body_nconsts`` of a while. Arrays that a body closes over become consts in front of its own. A
# scan of one iteration and the branch of a condition that is known are inlined, as compilers do.


# by identity: a closed-over array, and the input of the body that stands for it
Captured = dict[int, tuple[Any, Value]]


@reader("scan", "while", "cond")
def _loop(site: CallSite) -> Sequence[Atom]:
    name, given = site.eqn.primitive.name, site.eqn.params
    if name == "while" and given["cond_jaxpr"].out_avals[0].shape:
        site, given = _until_all_stop(site)
    jaxprs: Sequence[ClosedJaxpr]
    params: dict[str, Any]
    if name == "scan":
        consts, carries = _scan_counts(given)
        if given["length"] == 1:
            return _only_iteration(site, consts + carries, carries)
        jaxprs = (given["jaxpr"],)
        params = {
            "length": given["length"],
            "reverse": given["reverse"],
            "num_consts": consts,
            "num_carry": carries,
            "unroll": given.get("unroll", 1),
        }
    elif name == "while":
        jaxprs = (given["cond_jaxpr"], given["body_jaxpr"])
        params = {count: given[count] for count in ("cond_nconsts", "body_nconsts")} | _stated_iterations(site)
    else:
        jaxprs, params = given["branches"], {}
        if isinstance(site.inputs[0], Literal):
            taken = min(max(int(site.inputs[0].value), 0), len(jaxprs) - 1)
            return inline(closed(jaxprs[taken]), site.inputs[1:], site.frame, site.place)
    frames = [Frame(site.frame.ids, body=True) for _ in jaxprs]
    bodies = [read_graph(closed(jaxpr), frame, site.place) for jaxpr, frame in zip(jaxprs, frames, strict=True)]
    op = site.op(
        name, site.inputs, site.eqn.outvars, params=params, bodies=tuple(bodies), effects=has_effects(site.eqn)
    )
    op = _with_captured(op, site.frame, [frame.captured for frame in frames])
    site.frame.ops.append(op)
    return op.outputs


def _stated_iterations(site: CallSite) -> dict[str, int]:
    """The iterations of a while, as a parameter, if its condition reads a result of ``expect_iterations``."""
    given = site.eqn.params
    read = {id(x) for x in (*site.inputs[: given["cond_nconsts"]], *site.inputs[-len(site.eqn.outvars) :])}
    stated = [op for op in site.frame.ops if op.name == "expect_iterations" and id(op.outputs[0]) in read]
    return {"iterations": stated[0].params["about"]} if stated else {}


@reader("clamp")
def _clamp(site: CallSite) -> Sequence[Atom]:
    """A clamp of known scalars is one: ``lax.switch`` clamps its index, by which a branch is taken."""
    known = [x for x in site.inputs if isinstance(x, Literal) and not _opaque(x.value)]
    if len(known) < len(site.inputs):
        return _plain(site)
    low, x, high = (each.value for each in known)
    return (literal(np.clip(x, low, high), known[1].dtype),)


@reader("platform_index")
def _platform_index(site: CallSite) -> Sequence[Atom]:
    """The number of the branch that every device takes, whatever its platform; others are for the inside of kernels.

    ``jnp.diagonal`` has a branch of the latter kind, from which compilers drop all collectives.
    """
    branches = site.eqn.params["platforms"]
    taken = {branch_of(platform, branches) for platform in PLATFORMS}
    if len(taken) > 1 or None in taken:
        return _plain(site)
    return (literal(taken.pop(), np.dtype(np.int32)),)


def _until_all_stop(site: CallSite) -> tuple[CallSite, dict[str, Any]]:
    """A batched ``while`` whose iterations end apart, as ``vmap`` leaves it, with one condition.

    The loop runs as long as any of them does, and those that have ended keep their values.
    """
    given = site.eqn.params
    conditions, consts = given["cond_nconsts"], given["body_nconsts"]
    test, step = jaxpr_as_fun(given["cond_jaxpr"]), jaxpr_as_fun(given["body_jaxpr"])

    def goes_on(*args: jax.Array) -> jax.Array:
        return jax.numpy.any(test(*args)[0])

    def select(*args: jax.Array) -> list[jax.Array]:
        carry = args[conditions + consts :]
        (runs,) = test(*args[:conditions], *carry)
        new = step(*args[conditions:])
        ranked = (lax.expand_dims(runs, range(runs.ndim, x.ndim)) for x in carry)
        return [jax.numpy.where(each, x, y) for each, x, y in zip(ranked, new, carry, strict=True)]

    end = conditions + consts
    before, inside, carry = site.inputs[:conditions], site.inputs[:end], site.inputs[end:]
    shapes = [[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in some] for some in (before, inside, carry)]
    condition = jax.make_jaxpr(goes_on)(*shapes[0], *shapes[2])
    body = jax.make_jaxpr(select)(*shapes[1], *shapes[2])
    counts = {"cond_nconsts": conditions, "body_nconsts": conditions + consts}
    return site._replace(inputs=(*before, *inside, *carry)), {"cond_jaxpr": condition, "body_jaxpr": body, **counts}


def _with_captured(op: Op, around: Frame, captured: Sequence[Captured]) -> Op:
    """The op with the arrays that its bodies captured as further consts, or as operands of a conditional."""
    inputs, bodies, ports = list(op.inputs), [list(body.inputs) for body in op.bodies], list[LoopPort]()
    arrays = {key: array for own in captured for key, (array, _) in own.items()}
    if op.name == "cond":  # every branch takes every operand
        readers = [(key, range(len(op.bodies))) for key in arrays]
    else:
        readers = [(key, range(which, which + 1)) for which, own in enumerate(captured) for key in own]
    for key, among in readers:
        where = tuple((which, len(bodies[which])) for which in among)
        ports.append(LoopPort(PortRole.OPERAND if op.name == "cond" else PortRole.CONST, len(inputs), where))
        inputs.append(around.constant(arrays[key]))
        for which in among:
            bodies[which].append(captured[which][key][1] if key in captured[which] else around.value(arrays[key]))
    graphs = [replace(body, inputs=tuple(own)) for body, own in zip(op.bodies, bodies, strict=True)]
    return with_ports(replace(op, inputs=tuple(inputs)), (*ports, *loop_ports(op)), graphs)


def _only_iteration(site: CallSite, whole: int, carries: int) -> Sequence[Atom]:
    """The body of a scan of length one inlined: the first ``whole`` operands as they are, the only slice of others."""
    squeeze: dict[str, Any] = {"primitive": lax.squeeze_p, "params": {"dimensions": (0,)}}
    slices = [
        site.emit("squeeze", (x,), (jax.ShapeDtypeStruct(x.shape[1:], x.dtype),), **squeeze)[0]
        for x in site.inputs[whole:]
    ]
    found = inline(closed(site.eqn.params["jaxpr"]), (*site.inputs[:whole], *slices), site.frame, site.place)
    return (*found[:carries], *(_stack_of_one(site, x) for x in found[carries:]))


def _stack_of_one(site: CallSite, x: Atom) -> Atom:
    shape = (1, *x.shape)
    params = broadcast_params(shape, range(1, len(shape)))
    made = jax.ShapeDtypeStruct(shape, x.dtype)
    return site.emit("broadcast_in_dim", (x,), (made,), primitive=lax.broadcast_in_dim_p, params=params)[0]


def _scan_counts(params: dict[str, Any]) -> tuple[int, int]:
    """Consts and carries of a scan, in either spelling of its parameters."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()
    return len(consts), len(carry)


REMATTED = "rematted_computation"  # in the name stack of what ``jax.checkpoint`` computes again
RECOMPUTED = "recomputed"  # last part of the name stack of barriers in front of what the planner has computed again
CHECKPOINTED = "checkpointed"  # likewise of barriers in front of what ``jax.checkpoint`` computes again


def starts_recomputation(op: Op) -> bool:
    """Return whether an operation is the barrier in front of what the planner has computed again."""
    return op.name == "optimization_barrier" and op.scope.endswith(f"/{RECOMPUTED}")


def starts_checkpoint(op: Op) -> bool:
    """Return whether an operation is the barrier in front of what ``jax.checkpoint`` computes again."""
    return op.name == "optimization_barrier" and op.scope.endswith(f"/{CHECKPOINTED}")


# ---- Shardings -------------------------------------------------------------------------------------------------------
# A sharding that one of jax's own functions states is a constraint, as one by ``md.constrain`` is; so is one that an
# operation states for its result (``out_sharding=`` of ``jnp.einsum``, ``jnp.zeros``, ``reshape``). Autodiff states it
# for cotangents too; these are left free, as those of ``md.constrain`` are.


@reader("sharding_constraint", "reshard", "device_put")
def _stated(site: CallSite) -> Sequence[Atom]:
    params = site.eqn.params
    if site.eqn.primitive.name == "device_put":
        return [_constrained(site, x, s, "device_put") for x, s in zip(site.inputs, params["devices"], strict=True)]
    if site.eqn.primitive.name == "reshard":
        return [_constrained(site, site.inputs[0], params["dst_sharding"], "reshard", is_type=True)]
    return [_constrained(site, site.inputs[0], params["sharding"], "with_sharding_constraint")]


def _constrained(site: CallSite, x: Atom, sharding: Any, by: str, is_type: bool = False) -> Atom:
    """The value as an equation places it; what names no mesh axis, or the host's memory, stays an operation."""
    found = stated_layout(sharding, len(x.shape), is_type)
    is_cotangent = "transpose(" in site.place.scope and REMATTED not in site.place.scope
    is_left = getattr(sharding, "memory_kind", None) not in (None, DEVICE_KIND) or sharding is jax.memory.Space.Host
    is_here = sharding is None or sharding is jax.memory.Space.Device
    if is_here or not x.shape or not isinstance(x, Value) or is_cotangent:
        return x
    if is_left or found is None:
        params = {"memory": "host"} if is_left else {}
        x = site.emit(site.eqn.primitive.name, (x,), (x,), primitive=site.eqn.primitive, params=params)[0]
    if found is None:
        return x
    layout, closed = found
    if is_type and not layout.placements:
        return x
    params = stated_params(layout, by, closed)
    return site.emit("constrain", (x,), (x,), primitive=constrain_p, params=params)[0]


# ---- Calls -----------------------------------------------------------------------------------------------------------
# Equations that only wrap another jaxpr are inlined.
#
# A differentiated ``remat`` recomputes the forward pass inside the backward pass. Its operands pass an
# ``optimization_barrier``: otherwise XLA, and ``cse`` here, would see that forward values are computed twice and store
# them instead.


_BODY = ("jaxpr", "call_jaxpr", "fun_jaxpr", "fwd_jaxpr", "call", "callee")


@reader("jit", "pjit")
def _jit(site: CallSite) -> Sequence[Atom]:
    """The body of a jitted function between the shardings that it states."""
    params = site.eqn.params
    inputs = _under(site, site.inputs, params.get("in_shardings", ()), "jit(in_shardings=)")
    return _under(site, _inlined(site, inputs), params.get("out_shardings", ()), "jit(out_shardings=)")


def _under(site: CallSite, atoms: Sequence[Atom], shardings: Sequence[Any], by: str) -> Sequence[Atom]:
    named = [s if isinstance(s, NamedSharding) else None for s in shardings]
    if not any(named):
        return atoms
    return [_constrained(site, x, s, by) if s is not None else x for x, s in zip(atoms, named, strict=True)]


@reader(
    *("closed_call", "core_closed_call", "call", "core_call", "named_call"),
    *("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"),
    *("custom_vmap_call", "linear_call", "composite", "remat_opt", "eval_jaxpr", "fused_call", "xla_metadata_call"),
)
def _call(site: CallSite) -> Sequence[Atom]:
    return _inlined(site, site.inputs)


@reader("custom_lin")
def _forward_mode(site: CallSite) -> Sequence[Atom]:
    """The tangent of a function with ``jax.custom_vjp``, which reverse mode transposes away."""
    raise TraceError(
        f"a forward-mode derivative at {site.place.source}: a function with jax.custom_vjp has none; take jax.grad, "
        "jax.vjp or jax.jacrev in place of jax.jvp, jax.linearize or jax.jacfwd"
    )


@reader("remat", "remat2", "checkpoint")
def _remat(site: CallSite) -> Sequence[Atom]:
    params = site.eqn.params
    asked = params.get("prevent_cse", True)
    hidden: Iterable[bool] = asked if isinstance(asked, tuple) else repeat(bool(asked))
    if not params.get("differentiated", False):
        return _inlined(site, site.inputs)
    front = site._replace(place=site.place._replace(scope=f"{site.place.scope}/{CHECKPOINTED}"))
    return _inlined(site, [_barrier(front, x) if hide else x for x, hide in zip(site.inputs, hidden, strict=False)])


@reader("optimization_barrier")
def _barriers(site: CallSite) -> Sequence[Atom]:
    """One barrier per operand, so that operands keep layouts of their own."""
    return [_barrier(site, x) for x in site.inputs]


@reader("custom_linear_solve")
def _solve(site: CallSite) -> Sequence[Atom]:
    """Inlines the solver: after autodiff, nothing else of a linear solve is needed."""
    lengths, bodies = site.eqn.params["const_lengths"], site.eqn.params["jaxprs"]
    before = lengths.matvec + lengths.vecmat
    consts = site.inputs[before : before + lengths.solve]
    return inline(closed(bodies.solve), (*consts, *site.inputs[sum(lengths) :]), site.frame, site.place)


def _inlined(site: CallSite, inputs: Sequence[Atom]) -> Sequence[Atom]:
    body = next(site.eqn.params[name] for name in _BODY if name in site.eqn.params)
    return inline(closed(body), inputs, site.frame, site.place)


def _barrier(site: CallSite, x: Atom) -> Atom:
    if not isinstance(x, Value):
        return x
    return site.emit("optimization_barrier", (x,), (x,), primitive=optimization_barrier_p, params={})[0]
