"""Building blocks with bodies: loops, conditionals, remat, custom derivatives, functions under jit, vmap and grad."""

from collections.abc import Sequence
from dataclasses import replace

from tests.fuzz.blocks import BLOCKS, NO_GRADIENT, block
from tests.fuzz.positions import indices
from tests.fuzz.writer import Value, Writer

DEEPEST = 2


def grow(w: Writer, low: int, high: int) -> None:
    """Some blocks more; loops become rare inside loops."""
    for _ in range(w.number(low, high)):
        known = [b for b in BLOCKS if not (w.differentiable and b in NO_GRADIENT)]
        chosen = w.pick(known)
        if chosen not in BODIES or w.depth < DEEPEST:
            w.blocks.append(chosen.__name__)
            chosen(w)


def body(w: Writer, parameters: Sequence[Value], low: int = 1, high: int = 2) -> Writer:
    """The inside of a function of some values."""
    inside = w.inner()
    inside.values += parameters
    grow(inside, low, high)
    return inside


def result(inside: Writer, parameters: Sequence[Value]) -> Value:
    """A float of the body, one that it made if there is any."""
    names = {v.name for v in parameters}
    made = [v for v in inside.values if v.name not in names and v.dtype in ("float32", "bfloat16")]
    found = inside.pick(made[-3:]) if made else parameters[0]
    inside.use([found])
    return found


def carried(inside: Writer, carry: Value) -> str:
    """The next carry: partial sums may pile up in it, or it goes through the body."""
    same = [v for v in inside.values if (v.shape, v.dtype) == (carry.shape, carry.dtype) and v.name != carry.name]
    if not same:
        last = result(inside, [carry])
        return f"0.5 * {carry} + 0.25 * jnp.mean({last}).astype({carry}.dtype)"  # sums overflow in 20 iterations
    last = inside.pick(same[-3:])
    inside.use([last])
    forms = ["{0} + {1}", "{0} + {1}", "0.5 * {0} + 0.25 * {1}", "jnp.tanh({1})", "jnp.maximum({0}, {1})"]
    return inside.pick(forms).format(carry, last)


def parameter(w: Writer, x: Value, drop: int = 0, rounded: bool = True) -> Value:
    """A parameter of a function that is given ``x`` or, with ``drop``, rows of it."""
    return replace(x, name=w.fresh("p"), shape=x.shape[drop:], quantum=0.0 if rounded else x.quantum)


@block(4)
def scan(w: Writer) -> None:
    xs = w.floats(1, 3)
    start = w.floats(0, 2)
    c, x = parameter(w, start), parameter(w, xs, 1, rounded=False)
    inside = body(w, [c, x], 1, 3)
    f, after, kept = w.fresh("f"), carried(inside, c), result(inside, [x])
    w.function(f, [c.name, x.name], inside, f"{after}, {kept}")
    last, stacked = w.fresh("v"), w.fresh("v")
    options = ", reverse=True" if w.chance(20) else ""
    w.lines.append(f"{last}, {stacked} = lax.scan({f}, {start}, {xs}{options})")
    w.use([start, xs])
    w.keep(replace(start, name=last, size=start.size * 2 + 8, quantum=0.0))
    w.keep(replace(kept, name=stacked, shape=(xs.shape[0], *kept.shape)))


@block(2)
def repeat(w: Writer) -> None:
    start = w.floats(0, 2)
    c, i = parameter(w, start), w.fresh("i")
    inside = body(w, [c])
    f, after, trips = w.fresh("f"), carried(inside, c), w.number(1, 3)
    forms = ["lax.fori_loop(0, {n}, {f}, {x})"]
    if not w.differentiable:
        forms.append("lax.while_loop(lambda s: s[0] < {n}, lambda s: (s[0] + 1, {f}(*s)), (0, {x}))[1]")
    w.function(f, [i, c.name], inside, after)
    w.define(replace(start, size=start.size * 2 + 8, quantum=0.0), w.pick(forms).format(n=trips, f=f, x=start), [start])


@block(2)
def branch(w: Writer) -> None:
    x = w.floats(0, 3)
    f, g = _function(w, x), _function(w, x)
    if w.chance(50):
        asked = w.find(lambda v: v.dtype == "bool" and not v.shape) or w.input((), "bool", "bool")
        text = f"lax.cond({asked}, {f}, {g}, {x})"
    else:
        asked = indices(w, 2, ())
        text = f"lax.switch({asked}, [{f}, {g}], {x})"
    w.define(replace(x, size=x.size * 2 + 8, quantum=0.0), text, [x, asked])


@block(2)
def call(w: Writer) -> None:
    x = w.floats(0, 3)
    saved = "policy=jax.checkpoint_policies.dots_saveable"
    forms = [
        "jax.checkpoint({0})({1})",
        f"jax.checkpoint({{0}}, {saved})({{1}})",
        "jax.jit({0})({1})",
        "jax.grad(lambda t: jnp.sum(jnp.square({0}(t))))({1})",
    ]
    form = w.pick(forms)
    f = _function(replace(w, differentiable=w.differentiable or "grad" in form), x)
    w.define(replace(x, size=x.size * 4 + 8, quantum=0.0), form.format(f, x), [x])


@block()
def mapped(w: Writer) -> None:
    x = w.floats(1, 3)
    row = parameter(w, x, 1)
    inside = body(w, [row])
    f, made = w.fresh("f"), result(inside, [row])
    w.function(f, [row.name], inside, made.name)
    w.define(replace(made, shape=(x.shape[0], *made.shape), quantum=0.0), f"jax.vmap({f})({x})", [x])


@block()
def custom(w: Writer) -> None:
    x = w.floats()
    f = w.fresh("f")
    if w.chance(50):
        w.lines.append(f"{f} = jax.custom_vjp(lambda t: jnp.tanh(t) * t)")
        w.lines.append(f"{f}.defvjp(lambda t: ({f}(t), t), lambda t, g: (g * jnp.cos(t),))")
    else:
        w.lines.append(f"{f} = jax.custom_jvp(lambda t: jnp.tanh(t) * t)")
        w.lines.append(f"{f}.defjvps(lambda g, y, t: g * jnp.cos(t))")
    w.define(replace(x, quantum=0.0), f"{f}({x})", [x])


BODIES = {scan, repeat, branch, call, mapped}


def _function(w: Writer, x: Value) -> str:
    """Writes a function of ``x`` whose result has its shape."""
    given = parameter(w, x)
    inside = body(w, [given])
    f = w.fresh("f")
    w.function(f, [given.name], inside, carried(inside, given))
    return f
