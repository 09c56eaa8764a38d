"""Building blocks that move elements: reshapes, slices, gathers, running reductions, sorts; pins of inner values."""

from math import prod

from tests.fuzz.blocks import axis_of, block, moved, summed
from tests.fuzz.writer import Writer

# the same elements in another shape


@block(3)
def reshape(w: Writer) -> None:
    x = w.floats(1)
    i, shape = axis_of(w, x), list(x.shape)
    parts = [k for k in (2, 3, 4) if shape[i] % k == 0 and shape[i] > k]
    if parts and w.chance(50) and x.rank < 4:
        k = w.pick(parts)
        shape[i : i + 1] = [k, shape[i] // k] if w.chance(50) else [shape[i] // k, k]
    elif i + 1 < x.rank:
        shape[i : i + 2] = [shape[i] * shape[i + 1]]
    else:
        shape = [prod(shape)]
    moved(w, x, f"{x}.reshape({tuple(shape)})")


@block(2)
def transpose(w: Writer) -> None:
    x = w.floats(2)
    i, j = axis_of(w, x), axis_of(w, x)
    moved(w, x, f"jnp.swapaxes({x}, {i}, {j})" if w.chance(50) else f"{x}.T")


@block(2)
def broadcast(w: Writer) -> None:
    x = w.floats(0, 2)
    n = w.pick(w.dims)
    forms = [f"jnp.broadcast_to({x}, {(n, *x.shape)})", f"{x}[..., None]"]
    if x.rank:
        forms += [f"jnp.repeat({x}, 2, axis={axis_of(w, x)})", f"jnp.tile({x}, 2)", f"{x}[None]"]
    moved(w, x, w.pick(forms))


@block(2)
def join(w: Writer) -> None:
    x = w.floats(1, 3)
    y = w.like(x.shape, x.dtype)
    made = w.pick(["concatenate", "stack"])
    w.write(
        f"jnp.{made}([{x}, {y}], axis={axis_of(w, x)})",
        x,
        y,
        size=max(x.size, y.size),
        quantum=min(x.quantum, y.quantum),
    )


@block(2)
def cut(w: Writer) -> None:
    x = w.floats(1)
    i = axis_of(w, x)
    n = x.shape[i]
    low, high = w.number(0, n // 2), w.number((n + 2) // 2, n)
    text = w.pick([f"{low}:{max(high, low + 1)}", f"::{w.number(1, 2)}", "::-1", f":{(n + 1) // 2}"])
    moved(w, x, f"{x}[{':, ' * i}{text}]")


@block()
def pad(w: Writer) -> None:
    x = w.floats(1, 3)
    i = axis_of(w, x)
    amounts = [(w.number(0, 2), w.number(0, 2), w.number(0, 1)) if d == i else (0, 0, 0) for d in range(x.rank)]
    value = w.pick(["0.0", "0.0", "1.5"])
    w.write(
        f"lax.pad({x}, jnp.array({value}, {x}.dtype), {amounts})",
        x,
        size=max(x.size, 1.5),
        quantum=min(x.quantum, 0.25),
    )


@block()
def roll(w: Writer) -> None:
    x = w.floats(1)
    moved(w, x, f"jnp.roll({x}, {w.number(-2, 3)}, axis={axis_of(w, x)})")


# along one dim


@block(2)
def running(w: Writer) -> None:
    x = w.floats(1)
    axis, kind = axis_of(w, x), w.pick(["cumsum", "cumsum", "cummax", "cummin", "cumlogsumexp"])
    text = f"lax.{kind}({x}, axis={axis}, reverse={w.chance(30)})"
    if kind == "cumsum":
        summed(w, text, x.shape[axis], x)
    else:
        w.write(text, x, size=x.size + 3, quantum=0.0 if kind == "cumlogsumexp" else x.quantum)


@block()
def sort(w: Writer) -> None:
    x = w.floats(1)
    moved(w, x, f"jnp.sort({x}, axis={axis_of(w, x)}, descending={w.chance(30)})")


@block()
def ranked(w: Writer) -> None:
    x = w.exact(1)
    axis = axis_of(w, x)
    w.write(f"jnp.argsort({x}, axis={axis})", x, size=x.shape[axis], quantum=1.0)


@block()
def largest(w: Writer) -> None:
    x = w.floats(1)
    k = w.number(1, x.shape[-1])
    moved(w, x, f"lax.top_k({x}, {k})[0]")
    if x.exact:
        w.write(f"lax.top_k({x}, {k})[1]", x, size=x.shape[-1], quantum=1.0)


@block(1, gradient=False)
def sort_along(w: Writer) -> None:
    """Equal keys stay in order, so what is moved along is the same everywhere."""
    x = w.exact(1)
    y = w.like(x.shape)
    keys = w.number(1, 2)
    moved(w, y, f"lax.sort(({x}, {y}), dimension={axis_of(w, x)}, num_keys={keys})[1]", x)


# random numbers


@block()
def random(w: Writer) -> None:
    key = w.find(lambda v: v.dtype == "key") or w.input((), "key", "key")
    shape = w.shape(1, 3)
    form = w.pick(["uniform({0}, {1})", "bernoulli({0}, 0.7, {1})", "normal({0}, {1})", "randint({0}, {1}, 0, 5)",
                   "bits({0}, {1}).astype(jnp.int32) % 5",
                   "uniform(jax.random.fold_in({0}, 3), {1})", "normal(jax.random.split({0})[1], {1})"])  # fmt: skip
    w.write(
        f"jax.random.{form.format(key, shape)}", key, size=6.0, quantum=1.0 if "int" in form or "bern" in form else 0.0
    )
