"""Building blocks around algorithms that a device runs as a whole, and functions with a rule of their own."""

from tests.fuzz.blocks import axis_of, block, summed
from tests.fuzz.writer import Value, Writer

RULED = [
    ('md.rule("a b -> a b")(lambda t: jnp.tanh(t) * t)({0})', 1),
    ('md.rule("a b -> a", reduced={{"b": "sum"}}, linear=((0,),))(lambda t: t.sum(1))({0})', 1),
    ('md.rule("a b, a b -> a b")(lambda s, t: s * jnp.cos(t))({0}, {1})', 2),
    ('md.rule("a _, a _ -> a _")(lambda s, t: jax.nn.softmax(s + t))({0}, {1})', 2),
]


@block()
def ruled(w: Writer) -> None:
    x = matrix(w)
    text, operands = w.pick(RULED)
    y = w.like(x.shape)
    summed(w, text.format(x, y), x.shape[1], *(x, y)[:operands])


@block()
def factored(w: Writer) -> None:
    x = w.floats(2, 3, lambda v: v.dtype == "float32" and 0 < v.shape[-2] <= 8)
    square = f"({x} @ jnp.swapaxes({x}, -1, -2) / {x.shape[-1] * (x.size + 1) ** 2} + 2 * jnp.eye({x.shape[-2]}))"
    form = w.pick(["jnp.linalg.cholesky({0})", "jnp.linalg.inv({0})", "jnp.linalg.solve({0}, {1})",
                   "lax.linalg.triangular_solve({0}, {1}, left_side=True, lower=True)",
                   "jnp.abs(jnp.linalg.qr({0})[1])"])  # fmt: skip
    w.write(form.format(square, x), x, size=x.size + 2)


@block()
def fourier(w: Writer) -> None:
    x = w.floats(1, 3, lambda v: v.dtype == "float32")
    axis = axis_of(w, x)
    form = w.pick(["jnp.real(jnp.fft.fft({0}, axis={1}))", "jnp.abs(jnp.fft.rfft({0}, axis={1}) + 1j)"])
    w.write(form.format(x, axis), x, size=x.size * x.shape[axis] + 1)


@block()
def scanned(w: Writer) -> None:
    x = w.floats(1, 3)
    axis = axis_of(w, x)
    step = w.pick(["jnp.add", "jnp.maximum", "lambda s, t: 0.5 * s * jnp.tanh(t)"])
    text = f"lax.associative_scan({step}, {x}, axis={axis}, reverse={w.chance(30)})"
    w.write(text, x, size=x.size * x.shape[axis])


@block()
def pooled(w: Writer) -> None:
    x = w.floats(2, 4, lambda v: v.dtype == "float32")
    axis = axis_of(w, x)
    window = w.number(1, min(3, x.shape[axis]))
    sizes = tuple(window if d == axis else 1 for d in range(x.rank))
    steps = tuple(w.pick([1, window]) if d == axis else 1 for d in range(x.rank))
    kind, start = w.pick([("add", "0.0"), ("max", "-jnp.inf")])
    text = f"lax.reduce_window({x}, {start}, lax.{kind}, {sizes}, {steps}, '{w.pick(['SAME', 'VALID'])}')"
    w.write(text, x, size=x.size * window)


def matrix(w: Writer) -> Value:
    found = w.find(lambda v: v.dtype == "float32" and v.rank == 2)
    return found or w.input((w.pick(w.dims), w.pick(w.dims)))


@block()
def marked(w: Writer) -> None:
    x = w.floats()
    forms = ["lax.optimization_barrier({0})", 'checkpoint_name({0}, "kept")',
             "lax.stop_gradient({0}) * {0}"]  # fmt: skip
    form = w.pick([*forms, "lax.reduce_precision({0}, 5, 6)"] if x.exact else forms)
    w.write(form.format(x), x, size=x.size * max(x.size, 1.0))
