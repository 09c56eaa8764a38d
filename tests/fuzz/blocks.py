"""Building blocks without bodies: each adds one line to a program, for operands that it picks."""

from collections.abc import Callable
from math import prod

from tests.fuzz.writer import Value, Writer

Block = Callable[[Writer], object]
BLOCKS: list[Block] = []
NO_GRADIENT: set[Block] = set()


def block(weight: int = 1, gradient: bool = True) -> Callable[[Block], Block]:
    """Registers a block, as often as it shall be drawn."""

    def register(made: Block) -> Block:
        BLOCKS.extend([made] * weight)
        if not gradient:
            NO_GRADIENT.add(made)
        return made

    return register


def moved(w: Writer, x: Value, text: str, *more: Value) -> Value:
    """A line whose elements are those of ``x``."""
    return w.write(text, x, *more, size=x.size, quantum=x.quantum)


def summed(w: Writer, text: str, terms: int, *operands: Value) -> Value:
    """A line that sums so many products of the operands."""
    size, quantum = 1.0 * terms, 1.0
    for v in operands:
        size, quantum = size * v.size, quantum * v.quantum
    return w.write(text, *operands, size=size, quantum=quantum)


def axis_of(w: Writer, x: Value) -> int:
    return w.draw(x.rank)


# elementwise

BOUNDED = ["jnp.tanh({0})", "jnp.sin({0})", "jax.nn.sigmoid({0})", "jnp.exp(-jnp.square({0}))",
           "lax.rsqrt({0} * {0} + 1.0)", "jax.scipy.special.erf({0})",
           "jnp.log1p(jnp.abs({0})) / (1 + jnp.abs({0}))"]  # fmt: skip
SAME = [
    "-{0}",
    "jnp.abs({0})",
    "jax.nn.relu({0})",
    "jnp.clip({0}, -1.0, 1.5)",
    "jnp.maximum({0}, 0.5)",
    "jnp.minimum({0}, -0.25)",
]
PAIRS = ["{0} + {1}", "{0} - {1}", "jnp.maximum({0}, {1})", "jnp.minimum({0}, {1})"]


@block(3)
def bounded(w: Writer) -> None:
    x = w.floats()
    w.write(w.pick(BOUNDED).format(x), x, size=1.0)


@block(2)
def same(w: Writer) -> None:
    x = w.floats()
    w.write(w.pick(SAME).format(x), x, size=max(x.size, 1.0), quantum=min(x.quantum, 0.25))


@block()
def gelu(w: Writer) -> None:
    x = w.floats()
    w.write(f"{w.pick(['jax.nn.gelu', 'jax.nn.softplus', 'jax.nn.silu'])}({x})", x, size=x.size + 1)


@block(3)
def pair(w: Writer) -> None:
    x = w.floats()
    y = partner(w, x)
    w.write(w.pick(PAIRS).format(x, y), x, y, size=x.size + y.size, quantum=min(x.quantum, y.quantum))


@block(2)
def product(w: Writer) -> None:
    x = w.floats()
    y = partner(w, x)
    summed(w, f"{x} * {y}", 1, x, y)


@block()
def quotient(w: Writer) -> None:
    x = w.floats()
    y = partner(w, x)
    w.write(f"{x} / (1.0 + jnp.abs({y}))", x, y, size=x.size)


def partner(w: Writer, x: Value) -> Value:
    """An array that broadcasts against ``x``."""
    found = w.find(lambda v: v.dtype == x.dtype and v.shape in (x.shape, x.shape[1:], x.shape[-1:]) and v != x)
    if found:
        return found
    shape = w.pick([x.shape, x.shape[1:], tuple(n if w.chance(60) else 1 for n in x.shape)])
    return w.input(shape, dtype=x.dtype)


@block(1, gradient=False)
def cast(w: Writer) -> None:
    x = w.exact()
    dtype = w.pick(["int32", "float32", "bfloat16", "bool", "int8"])
    whole = dtype in ("int32", "int8", "bool")
    quantum = 1.0 if whole else x.quantum if x.dtype == "float32" else 1.0
    w.write(f"({x}).astype(jnp.{dtype}{'_' if dtype == 'bool' else ''})", x, size=x.size, quantum=quantum)


@block()
def half(w: Writer) -> None:
    x = w.floats()
    dtype = "bfloat16" if x.dtype == "float32" else "float32"
    w.write(f"{x}.astype(jnp.{dtype})", x, size=x.size, quantum=x.quantum)


# whole numbers and bools


@block()
def compare(w: Writer) -> None:
    x = w.exact()
    y = w.find(lambda v: v.dtype == x.dtype and v.exact and v.shape in (x.shape, x.shape[1:]) and v != x)
    if y is None or w.chance(30):
        w.write(f"{x} {w.pick(['>', '<=', '=='])} 0", x, quantum=1.0)
    else:
        w.write(f"{x} {w.pick(['>', '<', '>=', '!='])} {y}", x, y, quantum=1.0)


@block(1, gradient=False)
def whole(w: Writer) -> None:
    x = w.find(lambda v: v.dtype == "int32") or w.input(w.shape(1, 3), "whole", "int32")
    y = w.find(lambda v: v.dtype == "int32" and v.shape == x.shape and v != x)
    y = y or w.input(x.shape, "whole", "int32")
    forms = ["{0} + {1}", "{0} * {1}", "{0} - {1}", "{0} % 3", "{0} // 2", "{0} & {1}", "{0} ^ {1}", "{0} | {1}",
             "{0} << 1", "jnp.maximum({0}, {1})", "-{0}", "~{0}", "lax.population_count({0})"]  # fmt: skip
    w.write(w.pick(forms).format(x, y), x, y, size=1e3, quantum=1.0)


@block(1, gradient=False)
def logic(w: Writer) -> None:
    x = w.find(lambda v: v.dtype == "bool") or w.input(w.shape(1, 3), "bool", "bool")
    y = w.find(lambda v: v.dtype == "bool" and v.shape == x.shape and v != x)
    y = y or w.input(x.shape, "bool", "bool")
    w.write(w.pick(["{0} & {1}", "{0} | {1}", "{0} ^ {1}", "~{0}"]).format(x, y), x, y, quantum=1.0)


@block(2)
def where(w: Writer) -> None:
    x = w.floats()
    y = partner(w, x)
    c = w.find(lambda v: v.dtype == "bool" and v.shape in (x.shape, x.shape[1:])) or w.input(x.shape, "bool", "bool")
    w.write(f"jnp.where({c}, {x}, {y})", c, x, y, size=max(x.size, y.size), quantum=min(x.quantum, y.quantum))


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
    if prod(sizes[t] for t in kept) > 4096:
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
    padding = "SAME" if min(images.shape[1:-1]) < window or w.chance(60) else "VALID"
    strides = (w.pick([1, 1, 2, window]),) * spatial
    how = f"{strides}, '{padding}', dimension_numbers={numbers}, feature_group_count={groups}"
    text = f"lax.conv_general_dilated({images}, {kernel}, {how})"
    summed(w, text, window**spatial * channels // groups, images, kernel)


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
    x = w.floats(1)
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


@block(1)
def complex_numbers(w: Writer) -> None:
    x = w.floats(1, more=lambda v: v.dtype == "float32")
    y = w.like(x.shape)
    text = w.pick(["jnp.abs(lax.complex({0}, {1}) + 2.5)",
                   "jnp.real(lax.complex({0}, {1}) * lax.complex({1}, {0}))",
                   "jnp.imag(jnp.exp(1j * {0}) * {1})",
                   "jnp.real(jnp.sum(lax.complex({0}, {1}), axis=0))"])  # fmt: skip
    w.write(text.format(x, y), x, y, size=(x.size + y.size + 3) ** 2 * x.shape[0])
