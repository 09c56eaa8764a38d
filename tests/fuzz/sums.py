"""Building blocks that multiply and reduce."""

from math import prod

from tests.fuzz.blocks import axis_of, block, moved, summed
from tests.fuzz.writer import Writer

# products

TERMS = "bmnkhij"


@block(4)
def matmul(w: Writer) -> None:
    x = w.floats(2, 3)
    y = w.find(lambda v: v.dtype == x.dtype and v.rank == 2 and v.shape[0] == x.shape[-1])
    y = y or w.input((x.shape[-1], w.pick(w.dims)), dtype=x.dtype)
    summed(w, f"{x} @ {y}", x.shape[-1], x, y)


@block(3)
def einsum(w: Writer) -> None:
    x, y = w.floats(1, 4), w.floats(1, 4)
    if x.dtype != y.dtype:
        y = x
    left = TERMS[: x.rank]
    sizes, right, spare = dict(zip(left, x.shape, strict=True)), "", iter("pqrst")
    for n in y.shape:
        same_size = [t for t in left if sizes[t] == n and t not in right]
        term = w.pick(same_size) if same_size and w.chance(75) else next(spare)
        sizes[term], right = n, right + term
    terms = list(dict.fromkeys(left + right))
    kept = [t for t in terms if w.chance(60)][:4]
    if w.chance(50):
        kept.reverse()
    squares = x.name == y.name and set(left) == set(right) and not kept  # compilers make one of all sums of squares
    if squares or prod(sizes[t] for t in kept) > 4096:
        return
    summed(
        w,
        f'jnp.einsum("{left},{right}->{"".join(kept)}", {x}, {y})',
        prod(sizes.values()) // prod(sizes[t] for t in kept),
        x,
        y,
    )


@block()
def convolve(w: Writer) -> None:
    images, window = w.floats(3, 4), w.number(1, 3)
    spatial, channels = images.rank - 2, images.shape[-1]
    groups = w.pick([1, 1, 2, channels]) if channels % 2 == 0 else 1
    kernel = w.input((window,) * spatial + (channels // groups, groups * w.number(1, 2)), dtype=images.dtype)
    numbers = ("NHWC", "HWIO", "NHWC") if spatial == 2 else ("NWC", "WIO", "NWC")
    padding = "'SAME'" if min(images.shape[1:-1]) < window or w.chance(60) else "'VALID'"
    strides = (w.pick([1, 1, 2, window]),) * spatial
    spread = w.pick(["", "", f", lhs_dilation={(2,) * spatial}", f", rhs_dilation={(2,) * spatial}"])
    padding = f"{((1, window),) * spatial}" if spread else padding
    how = f"{strides}, {padding}, dimension_numbers={numbers}, feature_group_count={groups}{spread}"
    text = f"lax.conv_general_dilated({images}, {kernel}, {how})"
    summed(w, text, window**spatial * channels // groups, images, kernel)


@block()
def ragged(w: Writer) -> None:
    """Groups of rows by matrices of their own; some rows belong to none. JAX does not map all of it over new dims."""
    if w.outer:
        return
    x = w.floats(2, 2, lambda v: v.dtype == "float32")
    groups = w.pick(w.dims)
    matrices = w.like((groups, x.shape[1], w.pick(w.dims)))
    sizes = w.input((groups,), "index", "int32", size=max(1, x.shape[0] // groups))
    if x.shape[0] >= groups:
        summed(w, f"lax.ragged_dot({x}, {matrices}, {sizes})", x.shape[1], x, matrices, sizes)


# reductions and normalisations


@block(3)
def reduce_sum(w: Writer) -> None:
    x = w.floats(1)
    axis, keep = axis_of(w, x), w.chance(40)
    summed(w, f"jnp.sum({x}, axis={axis}, keepdims={keep})", x.shape[axis], x)


@block()
def total(w: Writer) -> None:
    x = w.floats(1)
    summed(w, f"jnp.{w.pick(['sum', 'mean'])}({x})", prod(x.shape), x)


@block(2)
def extreme(w: Writer) -> None:
    """The derivative asks which elements are the largest; the compiler may round them twice, each time otherwise."""
    x = w.floats(1, more=lambda v: v.exact or not w.differentiable)
    moved(w, x, f"jnp.{w.pick(['max', 'min'])}({x}, axis={axis_of(w, x)}, keepdims={w.chance(40)})")


@block()
def reduce_other(w: Writer) -> None:
    x = w.floats(1)
    form = w.pick(
        [
            "jnp.var({0}, axis={1})",
            "jax.nn.logsumexp({0}, axis={1})",
            "jnp.prod(jnp.tanh({0}), axis={1})",
            "jnp.mean({0}, axis={1})",
        ]
    )
    w.write(form.format(x, axis_of(w, x)), x, size=x.size**2 + 3)


@block(1, gradient=False)
def reduce_whole(w: Writer) -> None:
    x = w.exact(1)
    form = w.pick(["jnp.any({0} > 1, axis={1})", "jnp.all({0} < 1, axis={1})", "jnp.argmax({0}, axis={1})",
                   "jnp.argmin({0}, axis={1})", "jnp.count_nonzero({0}, axis={1})"])  # fmt: skip
    axis = axis_of(w, x)
    w.write(form.format(x, axis), x, size=x.shape[axis], quantum=1.0)


@block(2)
def softmax(w: Writer) -> None:
    x = w.floats(1)
    w.write(
        f"jax.nn.{w.pick(['softmax', 'softmax', 'log_softmax'])}({x}, axis={axis_of(w, x)})", x, size=x.size * 2 + 3
    )


@block(2)
def layernorm(w: Writer) -> None:
    x = w.floats(1)
    w.write(f"({x} - {x}.mean(-1, keepdims=True)) * lax.rsqrt({x}.var(-1, keepdims=True) + 0.5)", x, size=x.size * 3)
