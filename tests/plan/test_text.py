"""The printed plan: which arrays and collectives share a row, and what names them."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from jax import lax

import meshdsl as md
from meshdsl.layouts import Layout
from meshdsl.plan import Array
from meshdsl.plan.text import collective_rows, group_arrays
from meshdsl.util.text import bytes_text, seconds_text, table
from tests.programs import MESH, small_plan


def arrays(*paths, layout="data=S(0)"):
    return [Array(path, (8,), "float32", Layout.parse(layout)) for path in paths]


def test_layers_and_states_share_a_row():
    paths = [f"state/{m}/layers/{i}/{w}" for m in ("mu", "nu") for i in range(12) for w in ("wk", "wq")]
    groups = group_arrays(arrays(*paths))
    assert [(g.name, g.count) for g in groups] == [("state/{mu,nu}/layers/*/{wk,wq}", 48)]


def test_numbers_that_all_of_a_row_have_are_shown():
    alone = [*arrays("state/0/layers/1/w"), *arrays("state/0/layers/2/w", layout="data=B")]
    assert [g.name for g in group_arrays(alone)] == ["state/0/layers/1/w", "state/0/layers/2/w"]
    rows = arrays(*(f"state/0/{m}/layers/{i}/w" for m in ("mu", "nu") for i in (0, 2)))
    assert [g.name for g in group_arrays(rows)] == ["state/0/{mu,nu}/layers/*/w"]
    assert [g.name for g in group_arrays(arrays("p/mu/0", "p/nu/1"))] == ["p/{mu,nu}/*"]


def test_a_reason_shows_the_number_that_it_is_about():
    gather, reduction = small_plan().collectives[:2]
    layers = [replace(gather, reason=f"params/{i}/w data=S(0) -> data=B, needed by mul") for i in (0, 1)]
    assert [(c.reason, n) for c, n, _ in collective_rows([layers[0], reduction])] == [
        (layers[0].reason, 1),
        (reduction.reason, 1),
    ]
    (row,) = collective_rows(layers, [0.25, 0.5])
    assert row == (replace(gather, reason="params/*/w data=S(0) -> data=B, needed by mul"), 2, 0.75)


def test_one_of_several_results_is_named_by_its_type():
    whole = md.parallelize(lambda x: lax.top_k(x, 1), MESH, {"x": "data=S(0) model=B"}, {"*": "data=B model=B"})
    reasons = [c.reason.split(" (")[0] for c in whole.plan(np.ones((64, 512), np.float32)).collectives]
    assert reasons == ["result of top_k's float32[64,1]", "result of top_k's int32[64,1]"]


def test_what_a_loop_stacks_is_named_by_what_makes_it():
    """Also through the body of an inner loop."""

    def step(weights, x):
        def inner(y, w):
            return jnp.tanh(y @ w), None

        def outer(y, w):
            return jax.lax.scan(inner, y, w)[0], None

        return jax.grad(lambda w: jnp.mean(jax.lax.scan(outer, x, w)[0] ** 2))(weights)

    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((4, 4, 64, 64), (8192, 64))]
    plan = md.parallelize(step, "data=4", {"x": "data=S(0)"}).plan(*args)
    made = {name.split(" (")[0] for name, _ in plan.held if "(test_text.py:" in name}
    assert made & {"scan's tanh", "scan's one_minus_square"}  # what tanh keeps in jax 0.10, and in 0.12


def test_reasons_call_dims_by_their_names():
    """Of inputs, of what a loop reads of them, and of results."""
    names = nn.Partitioned(jax.ShapeDtypeStruct((4, 512, 512), jnp.float32), ("layers", "embed", "mlp"))

    def step(weights, batch):
        def loss(weights):
            layers = weights["w"].value
            y, _ = jax.lax.scan(lambda y, w: (jnp.tanh(y @ w), None), batch, layers)
            return jnp.mean(y**2)

        return jax.tree.map(lambda w, d: w - d, weights, jax.grad(loss)(weights))

    mesh = md.Mesh(data=4, model=2, topology="tpu-v5e")
    pins = {"weights/w": "data=S(embed) model=B", "batch": "data=S(0) model=B"}
    plan = md.parallelize(step, mesh, pins).plan({"w": names}, jax.ShapeDtypeStruct((8192, 512), jnp.float32))
    reasons = " ".join(c.reason for c in plan.collectives)
    assert "weights/w[i] data=S(embed) -> data=B" in reasons or "weights/w data=S(embed) -> data=B" in reasons
    assert "data=P -> data=S(embed)" in reasons and "S(0)" not in reasons.replace("batch", "")


def test_other_arguments_and_layouts_do_not_share_a_row():
    rows = [*arrays("a/w", "b/w"), *arrays("a/v", layout="data=B")]
    assert [g.name for g in group_arrays(rows)] == ["a/w", "b/w", "a/v"]


def test_many_alternatives_are_cut():
    assert [g.name for g in group_arrays(arrays(*(f"p/w{c}" for c in "abcdef")))] == ["p/{wa,wb,wc,wd,+2}"]


def test_names_with_hyphens_stay_whole():
    lines = list(table([("a", "reason"), ("x" * 80, "scatter-add " * 30)]))
    assert not any(line.endswith("-") for line in lines)


def test_wide_tables_wrap_their_last_column():
    lines = list(table([("a", "reason"), ("x" * 80, "word " * 30)]))
    assert max(map(len, lines)) <= 120
    assert lines[2].startswith(" " * 82 + "word")


@pytest.mark.parametrize(
    ("n", "text"), [(0, "0 B"), (6, "6 B"), (999, "999 B"), (1000, "1 kB"), (1234, "1.23 kB"), (56_789_000, "56.8 MB")]
)
def test_bytes_text(n, text):
    assert bytes_text(n) == text


@pytest.mark.parametrize(
    ("s", "text"), [(0, "0 s"), (1.5e-4, "150 us"), (0.0123, "12.3 ms"), (2.0, "2 s"), (75, "75 s")]
)
def test_seconds_text(s, text):
    assert seconds_text(s) == text
