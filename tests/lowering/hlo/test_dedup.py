"""Programs as they were lowered, without what any compiler drops; and FLOPs of their products."""

import jax
import jax.numpy as jnp
import pytest

from meshdsl.lowering.hlo.dedup import deduplicate
from meshdsl.lowering.hlo.flops import product_flops
from meshdsl.lowering.hlo.parse import parse_module

TEXT = """HloModule m

sum.1 {
  a.1 = f32[] parameter(0)
  b.1 = f32[] parameter(1)
  ROOT c.1 = f32[] add(a.1, b.1)
}

sum.2 {
  a.2 = f32[] parameter(0)
  b.2 = f32[] parameter(1)
  ROOT c.2 = f32[] add(a.2, b.2)
}

most {
  a.3 = f32[] parameter(0)
  b.3 = f32[] parameter(1)
  ROOT c.3 = f32[] maximum(a.3, b.3)
}

ENTRY main {
  x = f32[8] parameter(0)
  y = f32[8] parameter(1)
  one = f32[8] all-reduce(x), channel_id=1, replica_groups={{0,1}}, to_apply=sum.1
  same = f32[8] all-reduce(x), channel_id=2, replica_groups={{0,1}}, to_apply=sum.2
  most = f32[8] all-reduce(x), channel_id=1, replica_groups={{0,1}}, to_apply=most
  other = f32[8] all-reduce(y), channel_id=1, replica_groups={{0,1}}, to_apply=sum.1
  unread = f32[8] all-reduce(one), channel_id=1, replica_groups={{0,1}}, to_apply=sum.1
  ROOT all = (f32[8], f32[8], f32[8], f32[8]) tuple(one, same, most, other)
}
"""


def test_what_is_said_twice_or_not_read_is_dropped():
    kept = deduplicate(parse_module(TEXT)).computations
    assert [line.name for line in kept["main"]] == ["x", "y", "one", "most", "other", "all"]
    assert [line.name for line in kept["most"]] == ["a.3", "b.3", "c.3"]


def conv(x, w, **options):
    return jax.lax.conv_general_dilated(x, w, **{"window_strides": (1, 1), "padding": "VALID"} | options)


X, W = jnp.zeros((2, 8, 9, 9)), jnp.zeros((4, 8, 3, 3))
PRODUCTS = {
    "product": (lambda: jnp.zeros((16, 8)) @ jnp.zeros((8, 4)), 2 * 16 * 8 * 4),
    "batch dims": (lambda: jnp.einsum("bij,bjk->bik", jnp.zeros((3, 5, 7)), jnp.zeros((3, 7, 2))), 2 * 3 * 5 * 7 * 2),
    "convolution": (lambda: conv(X, W), 2 * 2 * 4 * 8 * 49 * 9),
    "stride": (lambda: conv(X, W, window_strides=(2, 2)), 2 * 2 * 4 * 8 * 16 * 9),
    "padding is no work": (lambda: conv(X, W, padding="SAME"), 2 * 2 * 4 * 8 * (9 + 8 + 8) ** 2),
    "nor are gaps": (lambda: conv(X, W, padding=((0, 0),) * 2, lhs_dilation=(2, 2)), 2 * 2 * 4 * 8 * 23**2),
    "groups": (lambda: conv(X, jnp.zeros((8, 1, 3, 3)), feature_group_count=8), 2 * 2 * 8 * 49 * 9),
    "loop": (lambda: jax.lax.scan(lambda c, _: (c @ c, None), jnp.zeros((4, 4)), None, length=5)[0], 5 * 2 * 4**3),
}


CALLS = {"Forward": ("x", "w", "y"), "BackwardInput": ("y", "w", "x"), "BackwardFilter": ("x", "y", "w")}
SHAPES = {"x": "f32[2,10,66,8]{3,2,1,0}", "w": "f32[4,3,3,8]{3,2,1,0}", "y": "f32[2,8,64,4]{3,2,1,0}"}


@pytest.mark.parametrize("kind", CALLS)
def test_flops_of_calls_of_cudnn(kind):
    first, second, made = CALLS[kind]
    given = "\n".join(f"  %{name} = {shape} parameter(0)" for name, shape in SHAPES.items())
    attributes = f'window={{size=3x3}}, dim_labels=b01f_o01i->b01f, custom_call_target="__cudnn$conv{kind}"'
    call = f"%c = ({SHAPES[made]}, u8[0]{{0}}) custom-call(%{first}, %{second}), {attributes}"
    text = f"ENTRY %m (a: f32[]) -> f32[] {{\n{given}\n  {call}\n}}\n"
    assert product_flops(parse_module(text)) == 2 * 2 * 8 * 64 * 4 * 8 * 9


@pytest.mark.parametrize(("function", "flops"), PRODUCTS.values(), ids=PRODUCTS)
def test_flops_of_products(function, flops):
    text = jax.jit(lambda: function()).lower().as_text("hlo")
    assert product_flops(parse_module(text)) == flops
