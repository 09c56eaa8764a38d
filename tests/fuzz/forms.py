"""Building blocks that cut, pad, join, shift and update arrays in the spellings that people use.

Slices, pads, concatenations and updates at static or dynamic positions, strides, reversals, rolls, differences,
stencils and windows: along one dim or two, with lengths that then divide over a mesh axis or do not.
"""

from collections.abc import Callable

from tests.fuzz.blocks import block
from tests.fuzz.positions import indices
from tests.fuzz.writer import Value, Writer

LONG = 4  # a dim on which forms with ends are tried
FORMS: list[Callable[[Writer], object]] = []


def form(weight: int = 1) -> Callable[[Callable[[Writer], object]], Callable[[Writer], object]]:
    """Registers a block that ``tests.fuzz.form_bytes`` measures as well."""

    def register(made: Callable[[Writer], object]) -> Callable[[Writer], object]:
        FORMS.append(made)
        return block(weight)(made)

    return register


def operand(w: Writer, low: int = 1, high: int = 3) -> tuple[Value, int]:
    """A float32 array, and one of its dims that has ends and a middle."""

    def fits(v: Value) -> bool:
        return v.dtype == "float32" and max(v.shape, default=0) >= LONG

    long = [n for n in w.dims if n >= LONG] or [8]
    found = w.find(lambda v: fits(v) and low <= v.rank <= high)
    x = found or w.input((w.pick(long), *w.shape(max(0, low - 1), high - 1)))
    return x, w.pick([d for d, n in enumerate(x.shape) if n >= LONG])


def at(axis: int, *texts: str) -> str:
    """Subscripts that index dim ``axis``, and the dims behind it."""
    return f"[{':, ' * axis}{', '.join(texts)}]"


def window(w: Writer, n: int) -> tuple[int, int]:
    """The bounds of a part of ``n`` elements, which is not all of them."""
    low = w.pick([0, 1, 1, 2, n // 2])
    high = w.pick([n, n - 1, n - 1, n - 2, n // 2 + 1])
    return (low, high) if 0 < high - low < n else (1, n)


def added(w: Writer, text: str, terms: float, *operands: Value) -> Value:
    """A line whose elements are sums of so many elements of the operands, with factors from 1/4 on."""
    size = terms * max(v.size for v in operands)
    return w.write(text, *dict.fromkeys(operands), size=size, quantum=min(v.quantum for v in operands) / 4)


# differences and stencils


@form(2)
def difference(w: Writer) -> None:
    x, i = operand(w)
    lag = w.number(1, min(3, x.shape[i] - 1))
    forms = [f"{x}{at(i, f'{lag}:')} - {x}{at(i, f':-{lag}')}",
             f"jnp.diff({x}, axis={i})",
             f"{x}{at(i, '::2')} - {x}{at(i, '1::2')}" if x.shape[i] % 2 == 0 else f"jnp.diff({x}, n=2, axis={i})",
             f"jnp.gradient({x}, axis={i})",
             f"{x}{at(i, '2:')} - 2 * {x}{at(i, '1:-1')} + {x}{at(i, ':-2')}"]  # fmt: skip
    added(w, w.pick(forms), 4, x)


@form(2)
def stencil(w: Writer) -> None:
    """A step of a heat equation; the ends stay, are repeated, or are zero."""
    x, i = operand(w)
    inner = f"{x}{at(i, '2:')} - 2 * {x}{at(i, '1:-1')} + {x}{at(i, ':-2')}"
    widths = tuple((1, 1) if d == i else (0, 0) for d in range(x.rank))
    mode = w.pick(["'constant'", "'edge'", "'wrap'", "'reflect'", "'symmetric'"])
    forms = [f"{x}.at{at(i, '1:-1')}.set({x}{at(i, '1:-1')} + 0.25 * ({inner}))",
             f"{x}.at{at(i, '1:-1')}.add(0.25 * ({inner}))",
             f"jnp.concatenate([{x}{at(i, ':1')}, 0.25 * ({inner}), {x}{at(i, '-1:')}], axis={i})",
             f"jnp.zeros_like({x}).at{at(i, '1:-1')}.set({inner})",
             f"{x} + 0.25 * (jnp.roll({x}, 1, {i}) - 2 * {x} + jnp.roll({x}, -1, {i}))",
             f"(lambda t: t{at(i, '2:')} - {x} + t{at(i, ':-2')})(jnp.pad({x}, {widths}, mode={mode}))"]  # fmt: skip
    added(w, w.pick(forms), 5, x)


@form()
def stencil_in_two_dims(w: Writer) -> None:
    x, _ = operand(w, 2)
    if min(x.shape[:2]) < LONG:
        return
    forms = ["{0}[1:, 1:] - {0}[:-1, :-1]",
             "{0}[2:, 1:-1] + {0}[:-2, 1:-1] + {0}[1:-1, 2:] + {0}[1:-1, :-2] - 4 * {0}[1:-1, 1:-1]",
             "{0}.at[1:-1, 1:-1].add(0.25 * ({0}[2:, 1:-1] + {0}[:-2, 1:-1] - 2 * {0}[1:-1, 1:-1]))",
             "jnp.roll({0}, (1, -1), (0, 1)) - {0}",
             "{0}.at[1:-1, :].set(0.5).at[:, 1:-1].add({0}[:, 2:])"]  # fmt: skip
    added(w, w.pick(forms).format(x), 8, x)


@form()
def shifted_pair(w: Writer) -> None:
    """Predictions against labels one further on."""
    x, i = operand(w)
    y = w.like(x.shape)
    forms = [f"jnp.square({x}{at(i, ':-1')} - {y}{at(i, '1:')})", f"{x}{at(i, ':-1')} * {y}{at(i, '1:')}"]
    size = (x.size + y.size) ** 2
    w.write(w.pick(forms), x, y, size=size, quantum=min(x.quantum, y.quantum) ** 2)


# rows


@form(2)
def row(w: Writer) -> None:
    x, i = operand(w)
    n = x.shape[i]
    place = w.pick(["0", "-1", "1", str(n // 2), "-1:", ":1", f"{n // 2}:{n // 2 + 2}", "(0, -1)", f"(1, {n - 2}, 1)"])
    text = f"{x}{at(i, f'jnp.array({place})' if place[0] == '(' else place)}"
    w.write(text, x, size=x.size, quantum=x.quantum)


@form(2)
def boundary(w: Writer) -> None:
    """Rows at the ends are overwritten or added to."""
    x, i = operand(w)
    ends = [
        ("0", "1"),
        ("-1", "-2"),
        ("0", "-1"),
        ("-1", "0"),
        (":1", "-2:-1"),
        ("-2:", ":2"),
        (f"{x.shape[i] // 2}", "0"),
    ]
    to, source = w.pick(ends)
    update = w.pick(["set({0})", "add({0})", "set(0.5 * {0})", "set(0.5)"]).format(f"{x}{at(i, source)}")
    more = w.pick(["", "", f".at{at(i, '-1')}.set({x}{at(i, '-2')})"])
    added(w, f"{x}.at{at(i, to)}.{update}{more}", 3, x)


@form(2)
def update(w: Writer) -> None:
    """A part is overwritten by an array as long as it is."""
    x, i = operand(w)
    low, high = window(w, x.shape[i])
    y = w.like((*x.shape[:i], high - low, *x.shape[i + 1 :]))
    starts = ", ".join(str(low) if d == i else "0" for d in range(x.rank))
    forms = [f"{x}.at{at(i, f'{low}:{high}')}.set({y})", f"{x}.at{at(i, f'{low}:{high}')}.add({y})",
             f"lax.dynamic_update_slice({x}, {y}, ({starts},))"]  # fmt: skip
    added(w, w.pick(forms), 2, x, y)


# strides, reversals, rolls


@form(2)
def strided(w: Writer) -> None:
    x, i = operand(w)
    forms = ["{0}{every}", "{0}{odd}", "{0}{back}", "{0}{third}", "{0}.at{every}.set(0.5)", "{0}.at{every}.add(1.0)",
             "{0}.at{odd}.add({0}{odd})", "{0}{back} + {0}"]  # fmt: skip
    spans = {"every": "::2", "odd": "1::2", "back": "::-1", "third": "1::3"}
    text = w.pick(forms).format(x, **{name: at(i, span) for name, span in spans.items()})
    added(w, text, 2, x)


@form(2)
def rolled(w: Writer) -> None:
    x, i = operand(w)
    n = x.shape[i]
    k = w.pick([1, 1, 2, n // 2, n - 1])
    zeros = f"jnp.zeros({(*x.shape[:i], k, *x.shape[i + 1 :])})"
    forms = [f"jnp.roll({x}, {k}, {i})", f"jnp.roll({x}, -{k}, {i})", f"jnp.flip({x}, {i})",
             f"jnp.concatenate([{x}{at(i, f'-{k}:')}, {x}{at(i, f':-{k}')}], axis={i})",
             f"jnp.concatenate([{x}{at(i, f'{k}:')}, {zeros}], axis={i})",
             f"jnp.concatenate([{zeros}, {x}{at(i, f':-{k}')}], axis={i})",
             f"jnp.concatenate([{x}{at(i, ':1')}, {x}{at(i, ':-1')}], axis={i})"]  # fmt: skip
    w.write(w.pick(forms), x, size=x.size, quantum=x.quantum)


# pads, joins and parts


@form(2)
def padded(w: Writer) -> None:
    x, i = operand(w)
    amounts = w.pick([(1, 1), (0, 1), (2, 0), (0, x.shape[i]), (1, 2)])
    widths = tuple(amounts if d == i else (0, 0) for d in range(x.rank))
    mode = w.pick(["'constant'", "'constant'", "'edge'", "'wrap'", "'reflect'", "'symmetric'"])
    numbers = w.pick([(-1, 1, 0), (1, -1, 0), (-1, -1, 0), (0, 1, 1), (0, 0, 1), (-2, 2, 0)])
    config = tuple(numbers if d == i else (0, 0, 0) for d in range(x.rank))
    forms = [f"jnp.pad({x}, {widths}, mode={mode})", f"lax.pad({x}, 0.0, {config})"]
    w.write(w.pick(forms), x, size=x.size, quantum=x.quantum)


@form(2)
def joined(w: Writer) -> None:
    """A row in front or behind, parts in another order, the same part twice."""
    x, i = operand(w)
    n = x.shape[i]
    cut = w.pick([1, n // 2, n - 1])
    row = w.like((*x.shape[:i], 1, *x.shape[i + 1 :]))
    forms = [f"jnp.concatenate([{row}, {x}], axis={i})", f"jnp.concatenate([{x}, {row}], axis={i})",
             f"jnp.concatenate([{row}, {x}{at(i, '1:')}], axis={i})",
             f"jnp.concatenate([{x}{at(i, f'{cut}:')}, {x}{at(i, f':{cut}')}], axis={i})",
             f"jnp.concatenate([{x}, {x}{at(i, '::-1')}], axis={i})",
             f"jnp.insert({x}, {cut}, 0.5, axis={i})", f"jnp.delete({x}, {cut}, axis={i})",
             f"jnp.stack([{x}{at(i, '1:')}, {x}{at(i, ':-1')}], axis={w.number(0, x.rank)})",
             f"jnp.concatenate([{x}{at(i, ':-1')}, 0.5 * {x}{at(i, '-1:')}], axis={i})"]  # fmt: skip
    added(w, w.pick(forms), 1, x, row)


@form()
def parts(w: Writer) -> None:
    x, i = operand(w)
    n = x.shape[i]
    cut = w.pick([1, n // 2, n - 1])
    forms = [f"(lambda a, b: jnp.tanh(a).sum({i}) + b.sum({i}))(*jnp.split({x}, [{cut}], axis={i}))",
             f"(lambda a, *rest: a + sum(rest))(*jnp.split({x}, 2, axis={i}))" if n % 2 == 0 else f"{x}{at(i, '1:')}",
             f"sum(t.mean({i}) for t in jnp.array_split({x}, 3, axis={i}))",
             f"{x}{at(i, '1:')}.mean({i}) - {x}{at(i, ':-1')}.mean({i})",
             f"jnp.sum(jnp.concatenate([jnp.tanh({x}), {x}{at(i, ':1')}], axis={i}), axis={i})"]  # fmt: skip
    w.write(w.pick(forms), x, size=x.size * n)


@form()
def frames(w: Writer) -> None:
    """Overlapping windows, each as a row."""
    x, i = operand(w, 1, 2)
    k = w.number(2, 3)
    spans = ", ".join(f"{x}{at(i, f'{j}:{x.shape[i] - k + 1 + j}')}" for j in range(k))
    places = f"jnp.arange({x.shape[i] - k + 1})[:, None] + jnp.arange({k})"
    w.write(w.pick([f"jnp.stack([{spans}], axis={x.rank})", f"jnp.take({x}, {places}, axis={i})"]), x, size=x.size,
            quantum=x.quantum)  # fmt: skip


# windows that slide


@form(2)
def sliding(w: Writer) -> None:
    x, i = operand(w)
    k, step = w.number(2, 3), w.pick([1, 1, 2])
    sizes = tuple(k if d == i else 1 for d in range(x.rank))
    steps = tuple(step if d == i else 1 for d in range(x.rank))
    kind, start = w.pick([("add", "0.0"), ("add", "0.0"), ("max", "-jnp.inf")])
    shape = f"{sizes}, {steps}, '{w.pick(['VALID', 'VALID', 'SAME'])}'"
    added(w, f"lax.reduce_window({x}, {start}, lax.{kind}, {shape})", k, x)


@form()
def convolved(w: Writer) -> None:
    x, _ = operand(w, 1, 1)
    kernel = w.input((w.number(2, 3),))
    text = f"jnp.convolve({x}, {kernel}, mode='{w.pick(['valid', 'same', 'full'])}')"
    w.write(text, x, kernel, size=x.size * kernel.size * 3, quantum=x.quantum * kernel.quantum)


# a length that stops dividing, in what people do with it


@form(2)
def uneven_rows(w: Writer) -> None:
    x, i = operand(w)
    low, high = window(w, x.shape[i])
    part = f"{x}{at(i, f'{low}:{high}')}"
    forms = [f"jax.nn.softmax({part}, axis={i})", f"jax.nn.log_softmax({part}, axis={i})",
             f"jnp.mean({part}, axis={i})", f"jax.nn.logsumexp({part}, axis={i})",
             f"jnp.tanh({part}) - jnp.tanh({part}).mean({i}, keepdims=True)", f"jnp.var({part}, axis={i})",
             f"jnp.sum({part} * {part}, axis={i})", f"lax.cumsum({part}, axis={i})"]  # fmt: skip
    w.write(w.pick(forms), x, size=x.size**2 * x.shape[i] + 3)


# positions that the step is given


@form(2)
def at_runtime(w: Writer) -> None:
    x, i = operand(w)
    n, k = x.shape[i], w.number(1, 2)
    start = indices(w, n - k + 1, ())
    part = w.like((*x.shape[:i], k, *x.shape[i + 1 :]))
    read = f"lax.dynamic_slice_in_dim({x}, {start}, {k}, {i})"
    forms = [read,
             f"lax.dynamic_update_slice_in_dim({x}, {part}, {start}, {i})",
             f"lax.dynamic_index_in_dim({x}, {start}, {i}, keepdims=False)", f"jnp.roll({x}, {start}, {i})",
             f"lax.dynamic_update_slice_in_dim({x}, 0.5 * {read}, {start}, {i})",
             f"{x}.at{at(i, f'{start}')}.add(1.0)"]  # fmt: skip
    size, quantum = max(x.size, part.size) + 1, min(x.quantum, part.quantum) / 2
    w.write(w.pick(forms), x, part, start, size=size, quantum=quantum)
