"""The padded program: the same graph with some strands longer.

A value is kept in every form in which somebody reads it, a form being the set of its dims that
are padded. What is read in another form is sliced or padded on first use. Padding starts as
zeros; ``zeros`` knows in which dims of which values it certainly still is, so that only the
others are masked.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import count
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.lax import GatherScatterMode

from meshdsl.ir.check import check_graph
from meshdsl.ir.graph import Atom, Graph, Literal, Op, TracedProgram, Value
from meshdsl.ir.rewrite import renumber, values
from meshdsl.padding.dim_groups import DimGroup, Port, padded_params
from meshdsl.padding.min_cut import padded_groups
from meshdsl.rules.elementwise import is_zero
from meshdsl.trace.read_jaxpr import Frame, inline
from meshdsl.trace.source import SourceContext

# ---- Zeros -----------------------------------------------------------------------------------------------------------
# Where padding is certainly still zero.
#
# Padding starts as zeros, and much of what happens to it keeps them: moving, casting, adding,
# scaling by a finite number. Anything not listed here may leave anything in the padding.


IsZero = Callable[[Port], bool]
_MOVES = (
    "transpose reshape squeeze rev slice split unstack copy name optimization_barrier constrain convert_element_type "
    "reduce_precision stop_gradient"
).split()
_FIXES_ZERO = "neg abs sign square sqrt real imag conj integer_pow reduce_sum reduce_max reduce_min".split()
_JOINT = "add add_any sub max min concatenate stack or".split()


def zero_dims(op: Op, strands: Sequence[DimGroup], is_zero_at: IsZero) -> list[Port]:
    """The results' dims whose padding is zero, given those of the operands'; ports as strands count them."""
    first = len(op.inputs)
    kept = (s for s in strands if _keeps_zero(op, s, is_zero_at))
    return [port for strand in kept for port in strand.ports if port[0] >= first]


def _keeps_zero(op: Op, strand: DimGroup, is_zero_at: IsZero) -> bool:
    if op.name == "broadcast_in_dim":
        return is_zero(op.inputs[0]) or _all_zero(op, strand, (0,), is_zero_at)
    if op.name in _MOVES or op.name in _FIXES_ZERO:
        return op.params.get("y", 1) > 0 and _all_zero(op, strand, (0,), is_zero_at)
    if op.name in _JOINT:
        return _all_zero(op, strand, range(len(op.inputs)), is_zero_at)
    if op.name == "select_n":
        return _all_zero(op, strand, range(1, len(op.inputs)), is_zero_at)
    if op.name in ("mul", "div"):
        return _scales_zero(op, strand, is_zero_at)
    return False


def _all_zero(op: Op, strand: DimGroup, operands: Sequence[int], is_zero_at: IsZero) -> bool:
    """Whether each of these operands is zero in the padding of the strand."""
    at = dict(strand.ports)
    return all(is_zero(op.inputs[i]) or (i in at and is_zero_at((i, at[i]))) for i in operands)


def _scales_zero(op: Op, strand: DimGroup, is_zero_at: IsZero) -> bool:
    """Zero times zero, or times or over a finite literal that is not zero."""
    if op.name == "mul" and _all_zero(op, strand, (0, 1), is_zero_at):
        return True
    scales = [i for i, x in enumerate(op.inputs) if isinstance(x, Literal) and _is_scale(x.value)]
    if scales != [1] and (op.name == "div" or scales != [0]):
        return False
    return _all_zero(op, strand, (1 - scales[0],), is_zero_at)


def _is_scale(value: Any) -> bool:
    return bool(np.isfinite(value)) and bool(value)


# ---- Rewrite ---------------------------------------------------------------------------------------------------------


Form = frozenset[int]
Chosen = Mapping[Op, Sequence[DimGroup]]
_PLAIN: Form = frozenset()
_NOTHING: Mapping[Port, bool] = MappingProxyType({})
_FILLED, _CLIPPED = GatherScatterMode.FILL_OR_DROP, GatherScatterMode.CLIP


def pad_program(program: TracedProgram, sizes: Mapping[int, int]) -> TracedProgram:
    """The program with dims padded inside, from each length in ``sizes`` to what it says; inputs and outputs stay.

    ``padded_groups`` says which dims. The program itself if there are none.
    """
    chosen = padded_groups(program.graph, sizes)
    if not chosen:
        return program
    graph = _Padder(program.graph, chosen, sizes, Frame(count(), body=False)).graph()
    renumber(graph)
    check_graph(graph)
    return replace(program, graph=graph)


class _Padder:
    """Rewrites one graph; operations go to ``frame``."""

    def __init__(self, graph: Graph, chosen: Chosen, sizes: Mapping[int, int], frame: Frame) -> None:
        self.source, self.chosen, self.sizes, self.frame = graph, chosen, sizes, frame
        self.forms: dict[int, dict[Form, Value]] = {}
        self.zeros: set[tuple[int, int]] = set()
        self.masks: dict[Any, Value] = {}
        self.makers: dict[int, Op] = {}

    def graph(self, taken: Mapping[Port, bool] = _NOTHING) -> Graph:
        """The rewritten graph; ``taken`` has the dims of its inputs that are padded, and whether with zeros."""
        forms = [Form(d for at, d in taken if at == i) for i in range(len(self.source.inputs))]
        inputs = tuple(map(self._define, self.source.inputs, forms))
        self.zeros |= {(inputs[i].id, d) for (i, d), zero in taken.items() if zero}
        for op in self.source.ops:
            self._rewrite(op)
        return replace(self.source, inputs=inputs, ops=tuple(self.frame.ops))

    def _rewrite(self, op: Op) -> None:
        """The operation again, and before it what makes its operands of what there is."""
        start, strands = len(self.frame.ops), self.chosen.get(op, ())
        new = self._padded(op, strands) if strands or op.bodies else self._copied(op)
        for made in self.frame.ops[start:]:
            where = self._asks(op, made)
            made.source, made.scope, made.phase = where.source, where.scope, where.phase
        self.frame.ops.append(new)
        for v in new.outputs:
            self.makers[v.id] = op

    def _copied(self, op: Op) -> Op:
        """An operation that has no padded dim."""
        inputs = tuple([self._read(x, _PLAIN) for x in op.inputs])
        return op.between(inputs, tuple([self._define(v, _PLAIN) for v in op.outputs]))

    def _padded(self, op: Op, strands: Sequence[DimGroup]) -> Op:
        inputs = [self._read(x, _form(strands, i)) for i, x in enumerate(op.inputs)]
        zero = zero_dims(op, strands, lambda port: self._is_zero(inputs[port[0]], port[1]))
        for strand in strands:
            self._prepare(op, strand, inputs)
        forms = [_form(strands, len(op.inputs) + i) for i in range(len(op.outputs))]
        outputs = tuple(map(self._define, op.outputs, forms))
        self.zeros |= {(outputs[i - len(op.inputs)].id, d) for i, d in zero}
        params = padded_params(op, inputs, outputs) if strands else op.params
        bodies = tuple(self._body(i, body, strands, inputs) for i, body in enumerate(op.bodies))
        return replace(op, inputs=tuple(inputs), outputs=outputs, params=params, bodies=bodies)

    def _asks(self, op: Op, new: Op) -> Op:
        """The operation for which ``new`` is made; what is cut where the graph ends belongs to the one that made it."""
        read = (self.makers.get(v.id) for v in values(new.inputs))
        return next((maker for maker in read if maker), op) if op.name == "return" else op

    def _body(self, i: int, body: Graph, strands: Sequence[DimGroup], inputs: Sequence[Atom]) -> Graph:
        """A rewritten body. What it takes from outside alone is padded as it is there; a carry may hold anything."""
        taken: dict[Port, bool] = {}
        for strand in strands:
            (port, d), *others = strand.ports
            zero = not others and port < len(inputs) and self._is_zero(inputs[port], d)
            taken.update((inner, zero) for at, inner in strand.inside if at == i and inner[0] < len(body.inputs))
        return _Padder(body, self.chosen, self.sizes, Frame(self.frame.ids, body=False)).graph(taken)

    def _define(self, value: Value, form: Form) -> Value:
        shape = tuple(self.sizes[n] if d in form else n for d, n in enumerate(value.shape)) if form else value.shape
        made = Value(next(self.frame.ids), shape, value.dtype)
        self.forms[value.id] = {form: made}
        return made

    def _read(self, x: Atom, form: Form) -> Atom:
        """The value in this form, made of the one in which it was defined."""
        if isinstance(x, Literal):
            return x
        forms = self.forms[x.id]
        if form in forms:
            return forms[form]
        made, value = next(iter(forms.items()))
        if made - form:
            value = forms.get(made & form) or forms.setdefault(made & form, self._slice(value, x.shape, made - form))
        if form - made:
            value = forms.get(form) or forms.setdefault(form, self._pad(value, form - made))
        return value

    def _slice(self, x: Value, shape: Sequence[int], dims: Form) -> Value:
        limits = [shape[d] if d in dims else n for d, n in enumerate(x.shape)]
        sliced = self._emit(lambda y: lax.slice(y, [0] * len(limits), limits), x)
        self.zeros |= {(sliced.id, d) for d in range(len(limits)) if (x.id, d) in self.zeros}
        return sliced

    def _pad(self, x: Value, dims: Form) -> Value:
        amounts = [(0, self.sizes[n] - n if d in dims else 0, 0) for d, n in enumerate(x.shape)]
        padded = self._emit(lambda y: lax.pad(y, np.zeros((), y.dtype), amounts), x)
        self.zeros |= {(padded.id, d) for d in range(len(amounts)) if d in dims or (x.id, d) in self.zeros}
        return padded

    def _is_zero(self, x: Atom, d: int) -> bool:
        return isinstance(x, Value) and (x.id, d) in self.zeros

    def _prepare(self, op: Op, strand: DimGroup, inputs: list[Atom]) -> None:
        """Make the operands such that this strand's padding changes nothing."""
        if strand.column is not None:
            inputs[1] = self._in_bounds(op, strand, inputs[1])
        if strand.fill is not None:
            for i, d in strand.ports:
                if i < len(inputs):
                    inputs[i] = self._masked(inputs[i], d, strand)

    def _masked(self, x: Atom, d: int, strand: DimGroup) -> Atom:
        """``x`` with the strand's fill in the padding of dim ``d``."""
        assert isinstance(x, Value)
        fill, zero = np.asarray(strand.fill), not np.any(strand.fill)
        if zero and (x.id, d) in self.zeros:
            return x
        key = x.id, d, fill.tobytes()
        if key not in self.masks:
            fill = fill.astype(x.dtype)
            self.masks[key] = self._emit(lambda y: _mask(y, d, strand.size, fill), x)
            self.zeros |= {(self.masks[key].id, e) for e in range(len(x.shape)) if zero and (x.id, e) in self.zeros}
            self.zeros |= {(self.masks[key].id, d)} if zero else set()
        return self.masks[key]

    def _in_bounds(self, op: Op, strand: DimGroup, indices: Atom) -> Atom:
        """Positions that fall into the padding, treated as those beyond the end of the dim are."""
        n, column, mode = strand.size, strand.column, op.params["mode"]
        if not isinstance(indices, Value) or column is None or (op.name != "gather" and mode != _CLIPPED):
            return indices  # what a scatter writes into the padding is never read
        beyond = self.sizes[n] if mode == _FILLED else n - 1
        return self._emit(lambda at: _redirected(at, column, n, beyond), indices)

    def _emit(self, function: Callable[[jax.Array], jax.Array], x: Value) -> Value:
        """The result of ``function``, traced, read and appended."""
        closed = jax.make_jaxpr(function)(jax.ShapeDtypeStruct(x.shape, x.dtype))
        (result,) = inline(closed, (x,), self.frame, SourceContext())
        assert isinstance(result, Value)
        return result


def _form(strands: Iterable[DimGroup], port: int) -> Form:
    return Form(d for strand in strands for i, d in strand.ports if i == port)


def _mask(x: jax.Array, d: int, size: int, fill: Any) -> jax.Array:
    """``x`` with ``fill`` from position ``size`` of dim ``d``."""
    kept = lax.broadcasted_iota(jnp.int32, x.shape, d) < size
    return lax.select(kept, x, lax.full(x.shape, fill, x.dtype))


def _redirected(at: jax.Array, column: int, size: int, beyond: int) -> jax.Array:
    """Indices with ``beyond`` for what is ``size`` or more in a column."""
    outside = at >= np.asarray(size, at.dtype)
    if at.shape[-1] > 1:
        outside &= lax.broadcasted_iota(jnp.int32, at.shape, at.ndim - 1) == column
    return lax.select(outside, lax.full(at.shape, beyond, at.dtype), at)
