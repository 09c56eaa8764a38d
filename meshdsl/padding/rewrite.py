"""Step 2: the padded program, in which the chosen dim groups are longer.

A value is kept in every *form* in which it is used, a form being the set of its dims that are padded. A use in another
form slices or pads the value, once. Padding starts as zeros. What it holds afterwards never reaches an element that is
kept: before an operation that combines positions, the padding is masked with the fill value of the group, unless
``zero_dims`` shows that it still is zero, and indices that fall into the padding are treated as out of bounds.
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
from meshdsl.padding.min_cut import padded_groups
from meshdsl.padding.resized_dims import resized_params, with_merged
from meshdsl.rules.dim_groups import DimAt, DimGroup
from meshdsl.rules.elementwise import is_zero
from meshdsl.trace.read_jaxpr import Frame, inline
from meshdsl.trace.source import SourceContext

# ---- Where padding is still zero -------------------------------------------------------------------------------------
# Padding starts as zeros, and moving, casting, adding and scaling by a finite number keep them. Operations that are not
# listed here may leave anything in the padding.

IsZero = Callable[[DimAt], bool]
_MOVES = (
    "transpose reshape squeeze rev slice split unstack copy name optimization_barrier constrain convert_element_type "
    "reduce_precision stop_gradient"
).split()
_MAPS_ZERO_TO_ZERO = "neg abs sign square sqrt real imag conj integer_pow reduce_sum reduce_max reduce_min".split()
_OF_ALL_ZERO = "add add_any sub max min concatenate stack or".split()


def zero_dims(op: Op, groups: Sequence[DimGroup], is_zero_at: IsZero) -> list[DimAt]:
    """Returns the results' dims whose padding is zero, positions being counted as in ``DimGroup.ports``.

    Args:
      is_zero_at: whether an operand's dim has zeros in its padding.
    """
    first_result = len(op.inputs)
    zero = (group for group in groups if _preserves_zero(op, group, is_zero_at))
    return [port for group in zero for port in group.ports if port[0] >= first_result]


def _preserves_zero(op: Op, group: DimGroup, is_zero_at: IsZero) -> bool:
    if op.name == "broadcast_in_dim":
        return is_zero(op.inputs[0]) or _all_zero(op, group, (0,), is_zero_at)
    if op.name in _MOVES or op.name in _MAPS_ZERO_TO_ZERO:
        return op.params.get("y", 1) > 0 and _all_zero(op, group, (0,), is_zero_at)
    if op.name in _OF_ALL_ZERO:
        return _all_zero(op, group, range(len(op.inputs)), is_zero_at)
    if op.name == "select_n":
        return _all_zero(op, group, range(1, len(op.inputs)), is_zero_at)
    if op.name in ("mul", "div"):
        return _scales_zero(op, group, is_zero_at)
    return False


def _all_zero(op: Op, group: DimGroup, operands: Sequence[int], is_zero_at: IsZero) -> bool:
    """Returns whether each of these operands is zero in the padding of the group."""
    at = dict(group.ports)
    return all(is_zero(op.inputs[i]) or (i in at and is_zero_at((i, at[i]))) for i in operands)


def _scales_zero(op: Op, group: DimGroup, is_zero_at: IsZero) -> bool:
    """Returns whether this is zero times zero, or zero times or over a finite literal that is not zero."""
    if op.name == "mul" and _all_zero(op, group, (0, 1), is_zero_at):
        return True
    literals = [(i, x.value) for i, x in enumerate(op.inputs) if isinstance(x, Literal)]
    scales = [i for i, value in literals if np.isfinite(value) and value]
    if scales != [1] and (op.name == "div" or scales != [0]):
        return False
    return _all_zero(op, group, (1 - scales[0],), is_zero_at)


# ---- The rewrite -----------------------------------------------------------------------------------------------------

Form = frozenset[int]  # dims that are padded
PaddedGroups = Mapping[Op, Sequence[DimGroup]]
_PLAIN: Form = frozenset()
_NO_PADDED_INPUTS: Mapping[DimAt, bool] = MappingProxyType({})
_FILL_MODE, _CLIP_MODE = GatherScatterMode.FILL_OR_DROP, GatherScatterMode.CLIP


def pad_program(program: TracedProgram, sizes: Mapping[int, int]) -> TracedProgram:
    """Returns the program with dims padded inside; inputs and outputs keep their sizes.

    Which dims are padded is decided by ``padded_groups``; without any, this is the program itself.

    Args:
      sizes: padded length by length.
    """
    chosen = padded_groups(program.graph, sizes)
    if not chosen:
        return program
    graph = _Padder(program.graph, chosen, with_merged(program.graph, sizes), Frame(count(), body=False)).graph()
    renumber(graph)
    check_graph(graph)
    return replace(program, graph=graph)


class _Padder:
    """Rewrites one graph, appending operations to ``frame``.

    ``forms`` are the new values by old id and form; ``zeros`` (new id, dim) with zeros in the padding; ``masked``
    values by what they were masked from; ``producers`` the old operation by id of its new result.
    """

    def __init__(self, graph: Graph, chosen: PaddedGroups, sizes: Mapping[int, int], frame: Frame) -> None:
        self.source, self.chosen, self.sizes, self.frame = graph, chosen, sizes, frame
        self.forms: dict[int, dict[Form, Value]] = {}
        self.zeros: set[tuple[int, int]] = set()
        self.masked: dict[Any, Value] = {}
        self.producers: dict[int, Op] = {}

    def graph(self, padded_inputs: Mapping[DimAt, bool] = _NO_PADDED_INPUTS) -> Graph:
        """Returns the rewritten graph.

        Args:
          padded_inputs: dims of the inputs that are padded, and whether with zeros.
        """
        forms = [Form(d for at, d in padded_inputs if at == i) for i in range(len(self.source.inputs))]
        inputs = tuple(map(self._define, self.source.inputs, forms))
        self.zeros |= {(inputs[i].id, d) for (i, d), zero in padded_inputs.items() if zero}
        for op in self.source.ops:
            self._rewrite(op)
        return replace(self.source, inputs=inputs, ops=tuple(self.frame.ops))

    def _rewrite(self, op: Op) -> None:
        """Append the operation, after what pads, slices and masks its operands."""
        start, groups = len(self.frame.ops), self.chosen.get(op, ())
        new = self._padded(op, groups) if groups or op.bodies else self._plain(op)
        for helper in self.frame.ops[start:]:
            origin = self._origin(op, helper)
            helper.source, helper.scope, helper.phase = origin.source, origin.scope, origin.phase
            helper.manual = origin.manual
        self.frame.ops.append(new)
        for v in new.outputs:
            self.producers[v.id] = op

    def _origin(self, op: Op, helper: Op) -> Op:
        """Returns the operation whose source line a helper gets: a slice at the return, that of the sliced value."""
        producers = (self.producers.get(v.id) for v in values(helper.inputs))
        return next((producer for producer in producers if producer), op) if op.name == "return" else op

    def _plain(self, op: Op) -> Op:
        inputs = tuple([self._use(x, _PLAIN) for x in op.inputs])
        return op.between(inputs, tuple([self._define(v, _PLAIN) for v in op.outputs]))

    def _padded(self, op: Op, groups: Sequence[DimGroup]) -> Op:
        inputs = [self._use(x, _form(groups, i)) for i, x in enumerate(op.inputs)]
        zero = zero_dims(op, groups, lambda port: self._is_zero(inputs[port[0]], port[1]))
        for group in groups:
            self._neutralize(op, group, inputs)
        forms = [_form(groups, len(op.inputs) + i) for i in range(len(op.outputs))]
        outputs = tuple(map(self._define, op.outputs, forms))
        self.zeros |= {(outputs[i - len(op.inputs)].id, d) for i, d in zero}
        params = resized_params(op, inputs, outputs) if groups else op.params
        bodies = tuple(self._body(i, body, groups, inputs) for i, body in enumerate(op.bodies))
        return replace(op, inputs=tuple(inputs), outputs=outputs, params=params, bodies=bodies)

    def _body(self, i: int, body: Graph, groups: Sequence[DimGroup], operands: Sequence[Atom]) -> Graph:
        """Returns a rewritten body. A const or slice has the padding of its operand; a carry's may hold anything."""
        padded_inputs: dict[DimAt, bool] = {}
        for group in groups:
            (position, d), *others = group.ports
            zero = not others and position < len(operands) and self._is_zero(operands[position], d)
            inner = (port for at, port in group.inside if at == i and port[0] < len(body.inputs))
            padded_inputs.update((port, zero) for port in inner)
        return _Padder(body, self.chosen, self.sizes, Frame(self.frame.ids, body=False)).graph(padded_inputs)

    # Values and their forms.

    def _define(self, value: Value, form: Form) -> Value:
        shape = tuple(self.sizes[n] if d in form else n for d, n in enumerate(value.shape)) if form else value.shape
        new = Value(next(self.frame.ids), shape, value.dtype)
        self.forms[value.id] = {form: new}
        return new

    def _use(self, x: Atom, form: Form) -> Atom:
        """Returns the value in a form, sliced or padded from that in which it was defined."""
        if isinstance(x, Literal):
            return x
        forms = self.forms[x.id]
        if form in forms:
            return forms[form]
        defined, value = next(iter(forms.items()))
        if defined - form:
            common = defined & form
            value = forms.get(common) or forms.setdefault(common, self._slice(value, x.shape, defined - form))
        if form - defined:
            value = forms.get(form) or forms.setdefault(form, self._pad(value, form - defined))
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

    # Padding that must not matter.

    def _neutralize(self, op: Op, group: DimGroup, inputs: list[Atom]) -> None:
        """Replace operands such that the padding of the group does not affect the result."""
        if group.column is not None:
            inputs[1] = self._out_of_bounds(op, group, inputs[1])
        if group.fill is not None:
            fills = dict.fromkeys(range(len(inputs)), group.fill) | dict(group.others)
            for i, d in group.ports:
                if i < len(inputs):
                    inputs[i] = self._filled(inputs[i], d, op.inputs[i].shape[d], fills[i])

    def _filled(self, x: Atom, d: int, size: int, fill: Any) -> Atom:
        """Returns ``x`` with ``fill`` in the padding of dim ``d``, which has ``size`` elements without it."""
        assert isinstance(x, Value)
        fill, zero = np.asarray(fill), not np.any(fill)
        if zero and (x.id, d) in self.zeros:
            return x
        key = x.id, d, fill.tobytes()
        if key not in self.masked:
            fill = fill.astype(x.dtype)
            self.masked[key] = new = self._emit(lambda y: _mask(y, d, size, fill), x)
            self.zeros |= {(new.id, e) for e in range(len(x.shape)) if zero and (x.id, e) in self.zeros}
            self.zeros |= {(new.id, d)} if zero else set()
        return self.masked[key]

    def _out_of_bounds(self, op: Op, group: DimGroup, indices: Atom) -> Atom:
        """Returns indices in which positions in the padding are beyond the padded end, or clipped to the last element.

        A scatter that drops needs neither: nothing reads what it writes into the padding.
        """
        n, column, mode = group.size, group.column, op.params["mode"]
        if not isinstance(indices, Value) or column is None or (op.name != "gather" and mode != _CLIP_MODE):
            return indices
        beyond = self.sizes[n] if mode == _FILL_MODE else n - 1
        return self._emit(lambda at: _redirected(at, column, n, beyond), indices)

    def _emit(self, function: Callable[[jax.Array], jax.Array], x: Value) -> Value:
        """Returns the result of ``function``, whose traced operations are appended."""
        closed = jax.make_jaxpr(function)(jax.ShapeDtypeStruct(x.shape, x.dtype))
        (result,) = inline(closed, (x,), self.frame, SourceContext())
        assert isinstance(result, Value)
        return result


def _form(groups: Iterable[DimGroup], position: int) -> Form:
    return Form(d for group in groups for i, d in group.ports if i == position)


def _mask(x: jax.Array, d: int, size: int, fill: Any) -> jax.Array:
    """Returns ``x`` with ``fill`` from position ``size`` of dim ``d`` on."""
    inside = lax.broadcasted_iota(jnp.int32, x.shape, d) < size
    return lax.select(inside, x, lax.full(x.shape, fill, x.dtype))


def _redirected(at: jax.Array, column: int, size: int, beyond: int) -> jax.Array:
    """Returns indices with ``beyond`` for positions of ``size`` or more in a column."""
    outside = at >= np.asarray(size, at.dtype)
    if at.shape[-1] > 1:
        outside &= lax.broadcasted_iota(jnp.int32, at.shape, at.ndim - 1) == column
    return lax.select(outside, lax.full(at.shape, beyond, at.dtype), at)
