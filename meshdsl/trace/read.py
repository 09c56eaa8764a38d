"""Reading a jaxpr: equations become operations, calls are inlined, closed-over arrays explicit.

    env = inputs
    for eqn in jaxpr:
        operands = read(eqn)
        env += the reader of its primitive:  a call is read in place,
                                             a loop with its bodies, each into a graph of its own,
                                             another library's primitive as the JAX code it runs,
                                             anything else becomes one operation

An array that a body closes over (a constant of its jaxpr, or of a call inlined into it) is
handed in by the loop as one more const: a body sees nothing but its inputs.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn
from jax.extend.core import Literal as JaxLiteral

from meshdsl.ir import Graph, Literal, Op, Value
from meshdsl.trace.foreign import written_out
from meshdsl.trace.graphs import Atom
from meshdsl.trace.source import Place


@dataclass
class Frame:
    """A graph while it is read.

    Args:
      ids: numbers for new values.
      body: the graph is a loop's body, so constants come in as inputs.
      captured: those constants, with the inputs made for them, by identity.
    """

    ids: Iterator[int]
    body: bool
    ops: list[Op] = field(default_factory=list)
    captured: dict[int, tuple[Any, Value]] = field(default_factory=dict)

    def value(self, like: Any) -> Value:
        """A new value of the shape and dtype of ``like``."""
        return Value(next(self.ids), tuple(like.shape), like.dtype)

    def constant(self, array: Any) -> Atom:
        """A closed-over array: a literal if it is a scalar, else an operation or one more input."""
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


class Site(NamedTuple):
    """An equation with the frame that its operations go to, its place in the program, its operands."""

    frame: Frame
    place: Place
    eqn: JaxprEqn
    inputs: tuple[Atom, ...]

    def emit(self, name: str, inputs: Iterable[Atom], outputs: Iterable[Any], **more: Any) -> tuple[Value, ...]:
        """Append an operation; its results, one new value per variable or value in ``outputs``."""
        made = tuple([self.frame.value(getattr(v, "aval", v)) for v in outputs])
        op = Op(0, name, inputs=tuple(inputs), outputs=made, source=self.place.source, scope=self.place.scope, **more)
        self.frame.ops.append(op)
        return made


Reader = Callable[[Site], Sequence[Atom]]
READERS: dict[str, Reader] = {}


def reader(*names: str) -> Callable[[Reader], Reader]:
    """Register how equations of these primitives are read."""

    def register(read: Reader) -> Reader:
        READERS.update(dict.fromkeys(names, read))
        return read

    return register


def read_jaxpr(closed: ClosedJaxpr) -> Graph:
    """The graph of a traced step, before any clean-up."""
    return read_graph(closed, Frame(count(), body=False), Place())


def read_graph(closed: ClosedJaxpr, frame: Frame, place: Place) -> Graph:
    """A jaxpr as a graph of its own, read into an empty frame; captured arrays are not among its inputs."""
    inputs = tuple(frame.value(v.aval) for v in closed.jaxpr.invars)
    returned = inline(closed, inputs, frame, place)
    frame.ops.append(Op(0, "return", None, {}, tuple(returned), (), place.source, scope=place.scope))
    return Graph(inputs, tuple(frame.ops))


def inline(closed: ClosedJaxpr, inputs: Sequence[Atom], frame: Frame, place: Place) -> list[Atom]:
    """Read the equations of a jaxpr into ``frame``; what it returns."""
    jaxpr = closed.jaxpr
    env: dict[Any, Atom] = dict(zip(jaxpr.constvars, map(frame.constant, closed.consts), strict=True))
    env.update(zip(jaxpr.invars, inputs, strict=True))

    def read(x: Any) -> Atom:
        return _read_literal(x, frame) if isinstance(x, JaxLiteral) else env[x]

    for eqn in jaxpr.eqns:
        site = Site(frame, place.at(eqn.source_info), eqn, tuple(map(read, eqn.invars)))
        results = READERS.get(eqn.primitive.name, _plain)(site)
        env.update(zip(eqn.outvars, results, strict=True))
    return [read(x) for x in jaxpr.outvars]


def written(
    function: Callable[..., Any], inputs: Sequence[Atom], ids: Iterator[int], like: Op
) -> tuple[list[Op], Atom]:
    """The operations of a function of some operands, at the place of another operation, and their one result."""
    frame = Frame(ids, body=False)
    made = jax.make_jaxpr(function)(*(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in inputs))
    (result,) = inline(made, inputs, frame, Place())
    return [replace(op, source=like.source, scope=like.scope) for op in frame.ops], result


def closed(jaxpr: Any) -> ClosedJaxpr:
    """A jaxpr with its constants; calls keep theirs open or closed."""
    return ClosedJaxpr(jaxpr, ()) if isinstance(jaxpr, Jaxpr) else jaxpr


def literal(value: Any, dtype: Any) -> Literal:
    """A scalar of exactly this dtype."""
    return Literal(value if _opaque(value) else np.asarray(value, dtype)[()], (), dtype)


def _read_literal(x: Any, frame: Frame) -> Atom:
    return frame.constant(x.val) if np.shape(x.val) else literal(x.val, x.aval.dtype)


def _opaque(array: Any) -> bool:
    """Arrays that numpy cannot hold: random keys, and tracers of a function around this one."""
    return isinstance(array, jax.core.Tracer) or (
        hasattr(array, "dtype") and jax.numpy.issubdtype(array.dtype, jax.dtypes.extended)
    )


def _plain(site: Site) -> Sequence[Atom]:
    eqn = site.eqn
    body = written_out(eqn)
    if body is not None:
        return inline(body, site.inputs, site.frame, site.place)
    more = {"primitive": eqn.primitive, "params": _plain_numbers(dict(eqn.params)), "effects": bool(eqn.effects)}
    return site.emit(eqn.primitive.name, site.inputs, eqn.outvars, **more)


def _plain_numbers(x: Any) -> Any:
    """Parameters with numpy's whole numbers, which autodiff leaves in some, as Python's."""
    if isinstance(x, dict):
        return {name: _plain_numbers(value) for name, value in x.items()}
    if type(x) is tuple:
        return tuple(map(_plain_numbers, x))
    return int(x) if isinstance(x, np.integer) else x
