"""Shift alignment: computations on a dim without its first or last elements are extended to the whole dim.

    sum(u[1:] - u[:-1])                        sum(select(i < n - 1, pad(u, (-1, 1)) - u, 0))
    concatenate [x[:1], f(y[:-1], x[1:])]      select(i == 0, x, f(pad(y, (1, -1)), x))
    u.at[1:-1].set(f(u[2:], u[:-2]))           select(0 < i < n - 1, f(pad(u, (-1, 1)), pad(u, (1, -1))), u)
    pad(f(g[1:]), (0, 1))                      pad(f(g), (-1, 1))          its gradient

``alignment`` decides which dims are put on which grid, and where on it. Here the values are made as long as their
grids: slices and pads become shifts along the grid, of which each block sends only its ends to its neighbours; the
places beside the elements may hold anything, so they are masked where elements are combined or put back. Differences,
stencils and their gradients are such patterns, and so is every level of ``jax.lax.associative_scan``.

A value is kept in every *form* in which it is used, a form being the set of its dims that are on their grids. An
operation that needs all elements of a dim and no others (a sort, or the return of the step) gets the plain form.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial, reduce
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from meshdsl.ir.graph import Atom, Graph, Literal, Op, Value
from meshdsl.ir.index import producers
from meshdsl.ir.manual import read_axes
from meshdsl.ir.rewrite import fresh_ids, values
from meshdsl.layouts.roundness import Roundness
from meshdsl.rules.dim_groups import DimGroup, padded_params
from meshdsl.rules.indexing import COMBINE
from meshdsl.trace.passes.alignment import (
    DimShift,
    Place,
    Placed,
    aligned_dims,
    aligned_groups,
    shifted_dims,
    updated_window,
)
from meshdsl.trace.passes.static_windows import SHORTER, Constants, within
from meshdsl.trace.read_jaxpr import Frame, inline
from meshdsl.trace.source import SourceContext

Form = frozenset[int]  # dims that are on their grids
_PLAIN: Form = frozenset()
_MOVES = frozenset({"slice", "split", "pad", "concatenate", *COMBINE})


def align_shifts(graph: Graph, roundness: Roundness, far: bool = False) -> Graph:
    """Returns the graph with such computations on whole dims; with ``far``, on much longer ones."""
    placed = aligned_dims(graph, roundness, far)
    return _Aligner(graph, placed, fresh_ids(graph)).graph() if placed else graph


class _Aligner:
    """Rewrites one graph.

    ``forms`` are the values by old id and form, ``masked`` values by what they were masked from.

    Args:
      inputs, results: the forms of those inputs and results of a body that are not plain; all of the step's are.
    """

    def __init__(
        self,
        graph: Graph,
        placed: Placed,
        ids: Iterator[int],
        inputs: Mapping[int, Form] = MappingProxyType({}),
        results: Mapping[int, Form] = MappingProxyType({}),
    ) -> None:
        self.source, self.placed = graph, placed
        self.inputs, self.results = inputs, results
        self.frame = Frame(ids, body=False)
        self.makers = producers(graph)
        self.constants = Constants(self.makers)
        self.forms: dict[int, dict[Form, Value]] = {}
        self.masked: dict[Any, Value] = {}

    def graph(self) -> Graph:
        """Returns the rewritten graph."""
        made = tuple(self._define(v, self.inputs.get(i, _PLAIN)) for i, v in enumerate(self.source.inputs))
        for op in self.source.ops:
            start = len(self.frame.ops)
            self._rewrite(op)
            for new in self.frame.ops[start:]:
                new.source, new.scope, new.phase = op.source, op.scope, op.phase
                new.manual = op.manual if new.name == op.name else read_axes(op)
        return replace(self.source, inputs=made, ops=tuple(self.frame.ops))

    def _rewrite(self, op: Op) -> None:
        moves = shifted_dims(op, self.constants) if op.name in _MOVES else []
        atoms, first = (*op.inputs, *op.outputs), len(op.inputs)
        if any(self._place(atoms[i], d) or self._place(atoms[first + j], e) for i, d, j, e, *_ in moves):
            self._move(op, moves)
        else:
            self._keep(op, aligned_groups(op) if self._touches(op) else [])

    def _touches(self, op: Op) -> bool:
        """Whether the operation has a dim on a grid; loops are rewritten anyway."""
        return bool(op.bodies) or any(self._full(x) for x in (*op.inputs, *op.outputs))

    # ---- Operations that treat elements alike, reduce them, or need them plain ----

    def _keep(self, op: Op, groups: list[DimGroup]) -> None:
        """Appends the operation on the forms that its groups allow."""
        atoms = (*op.inputs, *op.outputs)
        allowed = [self._allowed(op, groups, i, x) for i, x in enumerate(atoms)]
        inputs = [self._use(x, form) for x, form in zip(op.inputs, allowed, strict=False)]
        for group in groups:
            if group.fill is not None:
                for i, d in group.ports:
                    if i < len(inputs) and d in allowed[i]:
                        inputs[i] = self._filled(inputs[i], d, self._place_of(atoms[i], d), group.fill)
        outputs = tuple(self._define(v, form) for v, form in zip(op.outputs, allowed[len(inputs) :], strict=True))
        params = padded_params(op, inputs, outputs) if any(allowed) and not op.bodies else op.params
        bodies = tuple(self._body(i, op, groups, allowed) for i in range(len(op.bodies)))
        self.frame.ops.append(replace(op, inputs=tuple(inputs), outputs=outputs, params=params, bodies=bodies))
        if op.name == "iota" and op.params["dimension"] in allowed[0]:
            self._count_from_offset(op, outputs[0])

    def _allowed(self, op: Op, groups: Iterable[DimGroup], i: int, x: Atom) -> Form:
        """The dims of an operand or result that stay on their grids."""
        if op.name == "return":
            return self.results.get(i, _PLAIN)
        own = {d for group in groups for at, d in group.ports if at == i}
        return Form(own & self._full(x))

    def _body(self, which: int, op: Op, groups: Iterable[DimGroup], allowed: list[Form]) -> Graph:
        body = op.bodies[which]
        count, forms = len(body.inputs), dict[int, set[int]]()
        for group in groups:
            if all(d in allowed[i] for i, d in group.ports):
                for at, (i, d) in group.inside:
                    if at == which:
                        forms.setdefault(i, set()).add(d)
        atoms = (*body.inputs, *body.returned)
        on_grid = {i: Form(dims & self._full(atoms[i])) for i, dims in forms.items()}
        inputs = {i: form for i, form in on_grid.items() if i < count}
        results = {i - count: form for i, form in on_grid.items() if i >= count}
        return _Aligner(body, self.placed, self.frame.ids, inputs, results).graph()

    def _count_from_offset(self, op: Op, counted: Value) -> None:
        """Makes the element at the offset of its grid the first one."""
        place = self._place_of(op.outputs[0], op.params["dimension"])
        if place.offset or place.step > 1:
            form = next(iter(self.forms[op.outputs[0].id]))
            offset, step = (np.asarray(n, counted.dtype) for n in (place.offset, place.step))
            made = self._emit(lambda x: lax.div(x - offset, step) if place.step > 1 else x - offset, counted)
            self.forms[op.outputs[0].id] = {form: made}

    # ---- Operations that shift ----

    def _move(self, op: Op, moves: list[DimShift]) -> None:
        if op.name in ("slice", "split", "pad"):
            self._cut_or_pad(op, moves)
        elif op.name == "concatenate":
            self._join(op, moves)
        else:
            self._update(op, moves)

    def _cut_or_pad(self, op: Op, moves: list[DimShift]) -> None:
        """Every result is a pad of the operand, by negative amounts where it is cut; strides are applied last.

        Along a dim whose elements are some of its grid's places, strides leave all elements where they are.
        """
        x, steps = op.inputs[0], _strided(op)
        strided = {d for d in steps if not any(self._skips(y, d) for y in (x, *op.outputs))}
        fill = op.inputs[1] if op.name == "pad" else Literal(np.zeros((), x.dtype)[()], (), x.dtype)
        form = Form(self._full(x) - strided)
        for j, y in enumerate(op.outputs):
            starts = {move.dim: move.start for move in moves if move.result == j}
            made, config = Form(self._full(y) - strided), list[tuple[int, int, int]]()
            held = self._use(x, form)
            for d in range(len(y.shape)):
                low = starts.get(d, 0) + self._stored(y, d, made).offset - self._stored(x, d, form).offset
                room = self._stored(y, d, made).length - self._stored(x, d, form).length
                config.append((low, room - low, 0) if d not in strided else (0, 0, 0))
                if op.name == "pad" and d in form and self._shows_beside(op, x, d):
                    held = self._filled(held, d, self._place_of(x, d), fill)
            finish = partial(_with_strides, op=op, strided=strided)
            self._set(y, made, lambda a, b, c=config, f=finish: f(_padded(a, b, c), b), held, fill)  # type: ignore[misc]

    def _skips(self, x: Atom, d: int) -> bool:
        place = self._place(x, d)
        return place is not None and place.step > 1

    def _shows_beside(self, op: Op, x: Atom, d: int) -> bool:
        """Whether the result of a pad has places where the operand's grid has others than its elements."""
        low, high, between = op.params["padding_config"][d]
        place = self._place_of(x, d)
        return bool(between or (low > 0 and place.offset) or (high > 0 and place.length > place.elements.stop))

    def _join(self, op: Op, moves: list[DimShift]) -> None:
        """A concatenation selects, place by place, among its pieces moved to their places."""
        y, d = op.outputs[0], int(op.params["dimension"])
        made = self._full(y)
        place = self._stored(y, d, made)
        grids = {self._place_of(x, d).length for x in values(op.inputs) if d in self._full(x)}
        if d not in made and place.length not in grids:
            self._keep(op, aligned_groups(op))
            return
        pieces = [self._piece(x, d, place, move.start) for x, move in zip(op.inputs, moves, strict=True)]
        ends = [place.offset + move.start for move in moves[1:]]

        def select(*held: jax.Array) -> jax.Array:
            moved = [_padded(x, jnp.zeros((), x.dtype), c) for x, (_, c) in zip(held, pieces, strict=True)]
            at = lax.broadcasted_iota(jnp.int32, moved[0].shape, d)
            found = moved[-1]
            for piece, end in reversed(list(zip(moved, ends, strict=False))):
                found = lax.select(at < end, piece, found)
            return found

        self._set(y, made, select, *(x for x, _ in pieces))

    def _piece(self, x: Atom, d: int, place: Place, start: int) -> tuple[Atom, list[tuple[int, int, int]]]:
        """A value, and the pad that moves its elements to those of a piece of ``place`` from ``start`` on."""
        found, form, low = x, self._full(x), start + place.offset
        cut = self._cut(x, d)
        if d in form:
            low -= self._place_of(x, d).offset
        elif cut is not None:
            source, first = cut
            held = self._stored(source, d, self._full(source))
            moved = low - first - held.offset
            if held.length == place.length and abs(moved) <= max(1, place.length // SHORTER):
                found, form, low = source, self._full(source), moved
        used = self._use(found, form)
        config = [(0, 0, 0)] * len(used.shape)
        config[d] = (low, place.length - used.shape[d] - low, 0)
        return used, config

    def _cut(self, x: Atom, d: int) -> tuple[Value, int] | None:
        """The value from which ``x`` is cut along one dim, and the first element."""
        op = self.makers.get(x.id) if isinstance(x, Value) else None
        if op is None or op.name not in ("slice", "split") or not isinstance(op.inputs[0], Value):
            return None
        moves = [move for move in shifted_dims(op, self.constants) if op.outputs[move.result] is x]
        alone = len(moves) == 1 and moves[0].dim == d and not _strided(op)
        return (op.inputs[0], -moves[0].start) if alone else None

    def _update(self, op: Op, moves: list[DimShift]) -> None:
        """The update is moved to its window and selected there; along dims where it is plain, a part is updated."""
        window = updated_window(op, self.constants)
        assert window is not None
        x, update, y = op.inputs[0], op.inputs[moves[0].operand], op.outputs[0]
        form, on_grid = self._full(x), self._full(update)
        shape, config, index, inside = list[int](), list[tuple[int, int, int]](), list[slice](), dict[int, range]()
        held = self._use(update, on_grid)
        for d, p in enumerate(window.places):
            place = self._stored(x, d, form)
            n = 1 if p is None else held.shape[p]
            first, whole = window.starts[d] + place.offset, window.sizes[d] == x.shape[d]
            shape.append(n)
            if p in on_grid and not whole:
                low = first - self._place_of(update, p).offset
                config.append((low, place.length - n - low, 0))
                inside[d] = range(first, first + window.sizes[d])
            else:
                config.append((0, 0, 0))
            index.append(slice(first, first + n) if not whole and d not in inside else slice(0, place.length))
        combine, starts = COMBINE[op.name], [at.start for at in index]

        def write(x: jax.Array, update: jax.Array) -> jax.Array:
            new = _padded(update.reshape(shape), jnp.zeros((), update.dtype), config)
            part = x if new.shape == x.shape else lax.slice(x, starts, [at.stop for at in index])
            masks = (within(new.shape, d, places) for d, places in inside.items())
            new = lax.select(reduce(jnp.logical_and, masks), combine(part, new), part)
            return new if new.shape == x.shape else lax.dynamic_update_slice(x, new, starts)

        def write_small(x: jax.Array, update: jax.Array) -> jax.Array:
            if op.name == "dynamic_update_slice":
                return lax.dynamic_update_slice(x, update, starts)
            at, method = x.at[tuple(index)], _METHODS[op.name]
            return getattr(at, method)(update.reshape(shape), indices_are_sorted=True, unique_indices=True)  # type: ignore[no-any-return]

        self._set(y, form, write if inside else write_small, self._use(x, form), held)

    # ---- Values and their forms ----

    def _full(self, x: Atom) -> Form:
        """The dims of a value that have a place on a grid."""
        if not isinstance(x, Value):
            return _PLAIN
        return Form(d for d in range(len(x.shape)) if (x.id, d) in self.placed)

    def _place(self, x: Atom, d: int) -> Place | None:
        return self.placed.get((x.id, d)) if isinstance(x, Value) else None

    def _place_of(self, x: Atom, d: int) -> Place:
        return self.placed[x.id, d]

    def _stored(self, x: Atom, d: int, form: Form) -> Place:
        """The place of a dim in a form: plain dims are grids of their own."""
        return self._place_of(x, d) if d in form else Place(x.shape[d], 0, x.shape[d])

    def _define(self, v: Value, form: Form) -> Value:
        """A new value for ``v`` in a form; ``v`` itself in the plain one."""
        shape = tuple(self._stored(v, d, form).length for d in range(len(v.shape)))
        new = Value(next(self.frame.ids), shape, v.dtype) if form else v
        self.forms[v.id] = {form: new}
        return new

    def _set(self, v: Value, form: Form, function: Callable[..., jax.Array], *operands: Atom) -> None:
        """Appends ``function`` of the operands and makes its result the value ``v`` in a form."""
        self.forms[v.id] = {form: self._emit(function, *operands)}

    def _use(self, x: Atom, form: Form) -> Atom:
        """Returns a value in a form, cut or padded from that in which it was defined."""
        if not isinstance(x, Value):
            return x
        forms = self.forms[x.id]
        if form in forms:
            return forms[form]
        defined, value = next(iter(forms.items()))
        config, steps = [(0, 0, 0)] * len(x.shape), [1] * len(x.shape)
        for d in defined ^ form:
            place = self._place_of(x, d)
            low, high = place.offset, place.length - place.elements.stop
            config[d] = (low, high, place.step - 1) if d in form else (-low, -high, 0)
            steps[d] = 1 if d in form else place.step

        def change(y: jax.Array) -> jax.Array:
            moved = _padded(y, jnp.zeros((), y.dtype), config)
            return lax.slice(moved, [0] * y.ndim, moved.shape, steps) if max(steps, default=1) > 1 else moved

        forms[form] = self._emit(change, value)
        return forms[form]

    def _filled(self, x: Atom, d: int, place: Place, fill: Any) -> Atom:
        """Returns ``x`` with ``fill`` beside its elements along ``d``."""
        if place.length == place.size:
            return x
        known = isinstance(fill, Value)
        key = x.id, d, place, fill.id if known else np.asarray(getattr(fill, "value", fill)).tobytes()
        if key not in self.masked:
            atom = fill if isinstance(fill, Value | Literal) else Literal(fill.astype(x.dtype)[()], (), x.dtype)
            self.masked[key] = self._emit(
                lambda y, z: lax.select(within(y.shape, d, place.elements), y, jnp.broadcast_to(z, y.shape)), x, atom
            )
        return self.masked[key]

    def _emit(self, function: Callable[..., jax.Array], *operands: Atom) -> Value:
        """Appends ``function``, traced, and returns its result."""
        likes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands]
        (made,) = inline(jax.make_jaxpr(function)(*likes), operands, self.frame, SourceContext())
        assert isinstance(made, Value)
        return made


_METHODS = {
    "scatter": "set",
    "scatter-add": "add",
    "scatter-sub": "subtract",
    "scatter-mul": "multiply",
    "scatter-min": "min",
    "scatter-max": "max",
}


def _strided(op: Op) -> set[int]:
    """The dims of a slice or pad with strides, or elements between."""
    if op.name == "pad":
        return {d for d, (*_, between) in enumerate(op.params["padding_config"]) if between}
    return {d for d, step in enumerate(op.params.get("strides") or ()) if step > 1}


def _with_strides(x: jax.Array, fill: jax.Array, op: Op, strided: set[int]) -> jax.Array:
    """Applies a slice or pad along its strided dims."""
    if not strided:
        return x
    if op.name == "pad":
        config = enumerate(op.params["padding_config"])
        return lax.pad(x, fill, [amounts if d in strided else (0, 0, 0) for d, amounts in config])
    ends = zip(op.params["start_indices"], op.params["limit_indices"], op.params["strides"], strict=True)
    return lax.slice(x, *zip(*(end if d in strided else (0, x.shape[d], 1) for d, end in enumerate(ends)), strict=True))


def _padded(x: jax.Array, fill: jax.Array, config: list[tuple[int, int, int]]) -> jax.Array:
    """``x`` padded or cut; a slice where it is only cut."""
    if not any(map(any, config)):
        return x
    if all(low <= 0 and high <= 0 for low, high, _ in config):
        return lax.slice(
            x, [-low for low, *_ in config], [n + high for n, (_, high, _) in zip(x.shape, config, strict=True)]
        )
    return lax.pad(x, fill, config)
