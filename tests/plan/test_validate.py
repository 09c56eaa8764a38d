"""A given plan that does not hold for its program is refused, whatever part of it is wrong."""

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshdsl as md
from meshdsl.errors import PlanFileError
from meshdsl.layouts import B, Layout, Mesh, S
from meshdsl.plan.validate import check_runnable
from meshdsl.planner.costs import op_cost
from meshdsl.rules.registry import RULES, all_broadcast
from meshdsl.trace import trace
from meshdsl.util.text import bytes_text, seconds_text

MESH = Mesh(data=4, model=2)
ARGS = (np.ones((3, 16, 16), np.float32), np.ones((32, 16), np.float32))
PINS = {"x": "data=S(0)", "ws": "model=S(2)"}


def step(ws, x):
    def loss(ws):
        return jnp.mean(jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, ws)[0] ** 2)

    return ws - 0.1 * jax.grad(loss)(ws)


PLAN = md.parallelize(step, MESH, PINS).plan(*ARGS)
PROGRAM = trace(step, ARGS)


def refused(plan):
    with pytest.raises(PlanFileError) as caught:
        check_runnable(plan, PROGRAM)
    title, *rows, remedy = str(caught.value).splitlines()
    assert title == "the plan of step is not valid for step under the rules and costs of this meshdsl:"
    assert remedy == "plan again without plan= and save the new plan"
    return [row.removeprefix("  ") for row in rows]


def changed(**parts):
    return replace(PLAN, solution=replace(PLAN.solution, **parts))


def test_a_plan_holds_for_its_program():
    check_runnable(PLAN, PROGRAM)


def test_a_signature_that_is_no_longer_listed(monkeypatch):
    class Whole:
        def __init__(self, op):
            self.op = op

        def rows(self):
            return (all_broadcast(self.op),)

    monkeypatch.setitem(RULES, "tanh", Whole)
    rows = refused(PLAN)
    assert rows
    assert all(row.startswith("tanh at test_validate.py:") and ": no signature on " in row for row in rows)
    assert rows[0].endswith(" is (S(0)) -> (S(0))")


def test_a_sum_that_is_rounded_before_it_is_reduced_where_that_is_not_stated():
    def stating(text):
        return lambda w, x: md.constrain((x @ w).astype(jnp.bfloat16), text)

    args = (ARGS[1][:16], ARGS[1])
    plan = md.parallelize(stating("data=P model=P"), MESH, {"w": "data=S(0) model=S(0)"}).plan(*args)
    check_runnable(plan, trace(stating("data=P model=P"), args))
    with pytest.raises(PlanFileError) as caught:
        check_runnable(plan, trace(stating("data=P"), args))
    assert re.search(r"convert_element_type at \S+: no signature on model is \(P\) -> \(P\)\n", str(caught.value))


def test_signatures_that_each_hold_but_not_together(monkeypatch):
    """Rows of a merged dim are split through the minor factor, while axes before do not divide the major one fully."""

    def merge(x):
        return jnp.tanh(x.reshape(24, 8))

    x, pins = np.ones((4, 6, 8), np.float32), {"x": "data=S(0) model=S(1)"}
    monkeypatch.setattr(op_cost, "_dividing", lambda kinds, _, sizes: np.ones((len(kinds),) * len(sizes), np.bool_))
    plan = md.parallelize(merge, md.Mesh(data=2, model=2), pins).plan(x)
    with pytest.raises(
        PlanFileError, match=r"reshape at \S+: data=S\(0\) model=S\(0\) does not divide a tensor of shape"
    ):
        check_runnable(plan, trace(merge, (x,)))


def test_a_value_that_lies_otherwise():
    whole = Layout(data=B, model=B)
    for value, layout in PLAN.solution.layouts.items():
        if layout != whole:
            assert refused(changed(layouts={**PLAN.solution.layouts, value: whole}))


def test_an_operand_that_is_read_otherwise():
    other = Layout(data=B, model=S(0))
    for use, layout in PLAN.solution.uses.items():
        if layout != other:
            assert refused(changed(uses={**PLAN.solution.uses, use: other}))


def test_missing_parts():
    for value in PLAN.solution.layouts:
        kept = {v: layout for v, layout in PLAN.solution.layouts.items() if v != value}
        assert any("the plan has no layout for one of its tensors" in row for row in refused(changed(layouts=kept)))
    for op in PLAN.solution.rows:
        assert refused(changed(rows={o: rows for o, rows in PLAN.solution.rows.items() if o != op}))
    for value in PLAN.solution.trees:
        rows = refused(changed(trees={v: tree for v, tree in PLAN.solution.trees.items() if v != value}))
        assert any(
            f"uses value {value} as " in row and row.endswith(", which no reshard step produces") for row in rows
        )


def test_moves_at_other_prices():
    for value, tree in PLAN.solution.trees.items():
        dear = replace(tree[0], seconds=tree[0].seconds * 2)
        (row,) = refused(changed(trees={**PLAN.solution.trees, value: (dear, *tree[1:])}))
        price = f"{dear.bytes} bytes in {seconds_text(dear.seconds)}"
        assert row == f"value {value}: no {dear.kind} from {dear.before} to {dear.after} of {price}"


def test_collectives_that_do_not_follow():
    count = len(PLAN.collectives)
    assert count
    assert refused(replace(PLAN, collectives=PLAN.collectives[1:])) == [
        f"collectives: {count - 1} in the plan, {count} follow from its layouts"
    ]
    first = PLAN.collectives[0]
    (row,) = refused(replace(PLAN, collectives=(replace(first, trips=7), *PLAN.collectives[1:])))
    assert row.startswith(f"collectives[0]: {first.kind} {','.join(first.axes)} {first.bytes} 7 ")


def test_axes_in_another_order():
    (leaf,) = (i for i, array in enumerate(PLAN.inputs) if array.path == "ws")
    both, swapped = Layout(data=S(2), model=S(2)), Layout(model=S(2), data=S(2))
    plan = md.parallelize(step, MESH, {**PINS, "ws": both}).plan(*ARGS)
    check_runnable(plan, PROGRAM)
    rows = refused(replace(plan, solution=replace(plan.solution, layouts={**plan.solution.layouts, leaf: swapped})))
    assert "input ws: its tensors are split over data and model in different orders" in rows


def test_a_limit_that_only_holds_with_the_donated_arguments():
    def sorts(w):
        return jnp.sort(jnp.sort(jnp.sort(w), axis=0))

    whole = md.parallelize(sorts, MESH).plan(ARGS[1])
    donating = md.parallelize(sorts, MESH, donate_argnums=0).plan(ARGS[1])
    assert donating.memory < whole.memory
    md.parallelize(sorts, MESH, donate_argnums=0, memory=donating.memory, plan=donating).plan(ARGS[1])
    with pytest.raises(PlanFileError) as caught:
        md.parallelize(sorts, MESH, memory=donating.memory, plan=donating).plan(ARGS[1])
    said = bytes_text(donating.memory)
    assert str(caught.value).splitlines()[1] == (
        f"  memory: {bytes_text(whole.memory)} per device with the arguments donated here, "
        f"{said} in the plan, {said} allowed"
    )
