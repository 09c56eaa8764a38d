"""Building blocks without bodies: each adds one line to a program, for operands that it picks."""

from collections.abc import Callable

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


@block(1)
def complex_numbers(w: Writer) -> None:
    x = w.floats(1, more=lambda v: v.dtype == "float32")
    y = w.like(x.shape)
    text = w.pick(["jnp.abs(lax.complex({0}, {1}) + 2.5)",
                   "jnp.real(lax.complex({0}, {1}) * lax.complex({0}, -{1}))",
                   "jnp.imag(jnp.exp(1j * {0}) * {1})",
                   "jnp.real(jnp.sum(lax.complex({0}, {1}), axis=0))"])  # fmt: skip
    w.write(text.format(x, y), x, y, size=(x.size + y.size + 3) ** 2 * x.shape[0])
