"""Building blocks that read and write elements at positions."""

from math import prod

from tests.fuzz.blocks import axis_of, block, moved, summed
from tests.fuzz.writer import Value, Writer


@block(2)
def gather(w: Writer) -> None:
    x = w.floats(1, 3)
    axis = axis_of(w, x)
    ids = indices(w, x.shape[axis], w.shape(1, 2))
    moved(w, x, f"jnp.take({x}, {ids}, axis={axis})" if w.chance(60) else f"{x}[{':, ' * axis}{ids}]", ids)


@block()
def take_along(w: Writer) -> None:
    x = w.floats(1, 3)
    axis = axis_of(w, x)
    ids = indices(w, x.shape[axis], x.shape)
    moved(w, x, f"jnp.take_along_axis({x}, {ids}, axis={axis})", ids)


@block(2)
def scatter(w: Writer) -> None:
    x = w.floats(1, 3)
    ids = indices(w, x.shape[0], w.shape(1, 2))
    y = w.like((*ids.shape, *x.shape[1:]), x.dtype)
    kind = w.pick(["add"] if w.differentiable else ["add", "add", "max", "min"])
    size = x.size + y.size * (prod(ids.shape) if kind == "add" else 1)
    w.write(f"{x}.at[{ids}].{kind}({y})", x, ids, y, size=size, quantum=min(x.quantum, y.quantum))


@block()
def segments(w: Writer) -> None:
    x = w.floats(1, 3)
    n = w.pick(w.dims)
    ids = indices(w, n, x.shape[:1])
    summed(w, f"jax.ops.segment_sum({x}, {ids}, {n})", x.shape[0], x, ids)


@block()
def one_hot(w: Writer) -> None:
    n = w.pick(w.dims)
    ids = indices(w, n, w.shape(1, 2))
    w.write(f"jax.nn.one_hot({ids}, {n})", ids, quantum=1.0)


@block()
def dynamic_slice(w: Writer) -> None:
    x = w.floats(1, 3)
    axis = axis_of(w, x)
    length = w.number(1, x.shape[axis])
    start = indices(w, x.shape[axis] - length + 1, ())
    moved(w, x, f"lax.dynamic_slice_in_dim({x}, {start}, {length}, {axis})", start)


@block()
def dynamic_update(w: Writer) -> None:
    x = w.floats(1, 3)
    axis = axis_of(w, x)
    length = w.number(1, x.shape[axis])
    start = indices(w, x.shape[axis] - length + 1, ())
    y = w.like((*x.shape[:axis], length, *x.shape[axis + 1 :]), x.dtype)
    text = f"lax.dynamic_update_slice_in_dim({x}, {y}, {start}, {axis})"
    w.write(text, x, y, start, size=max(x.size, y.size), quantum=min(x.quantum, y.quantum))


def indices(w: Writer, below: int, shape: tuple[int, ...]) -> Value:
    """Whole numbers from 0 to ``below`` - 1; positions of slices are in bounds, which some compilers get wrong."""
    found = w.find(lambda v: v.dtype == "int32" and v.shape == shape and (shape or v.size < below))
    return found or w.input(shape, "index", "int32", size=below - 1)


# positions that are out of bounds, batches of positions, windows at positions


@block()
def outside(w: Writer) -> None:
    """A third of the positions is out of bounds."""
    x = w.floats(1, 3)
    axis = axis_of(w, x)
    n = x.shape[axis]
    ids = indices(w, n, w.shape(1, 2))
    mode = w.pick(["'clip'", "'fill', fill_value=0"])
    moved(w, x, f"jnp.take({x}, {ids} * 3 // 2, axis={axis}, mode={mode})", ids)


@block()
def in_batches(w: Writer) -> None:
    x = w.floats(2, 3)
    ids = indices(w, x.shape[1], (x.shape[0], w.pick(w.dims)))
    form = w.pick(["{0}[{1}]", "jnp.zeros_like({0}).at[{1}].add(1)", "{0}.at[{1}].add({0}[{1}])"])
    text = f"jax.vmap(lambda t, i: {form.format('t', 'i')})({x}, {ids})"
    w.write(text, x, ids, size=(x.size + 1) * (ids.shape[1] + 1), quantum=x.quantum)


@block()
def overwrite(w: Writer) -> None:
    """One position, or each once: of several writers to one place any may be the last."""
    x = w.floats(1, 3)
    at = indices(w, x.shape[0], ())
    y = w.like(x.shape[1:], x.dtype)
    forms = ["{0}.at[{1}].set({2})", *["{0}.at[::2].set({2})"] * (x.shape[0] > 1)]
    form = w.pick(forms if w.differentiable else [*forms, "{0}.at[{1}].multiply({2})"])
    w.write(form.format(x, at, y), x, at, y, size=x.size * y.size + x.size + y.size)


@block()
def window(w: Writer) -> None:
    """A slice that is dynamic in two dims, and perhaps written back elsewhere."""
    x = w.floats(2, 3)
    lengths = [w.number(1, n) for n in x.shape[:2]]
    i, j = (indices(w, n - k + 1, ()) for n, k in zip(x.shape, lengths, strict=False))
    rest = ", 0" * (x.rank - 2)
    cut = f"lax.dynamic_slice({x}, ({i}, {j}{rest}), {(*lengths, *x.shape[2:])})"
    back = f"lax.dynamic_update_slice({x}, 0.5 * {cut}, (0, 0{rest}))"
    w.write(cut if w.chance(50) else back, x, i, j, size=x.size, quantum=x.quantum / 2)
