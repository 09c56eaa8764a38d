"""Pins: how globs become layouts, which outputs follow which inputs, and every way to get it wrong."""

from itertools import combinations
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshdsl.errors import PinError
from meshdsl.ir.graph import Graph, Leaf, Op, TracedProgram, Value
from meshdsl.layouts import B, Layout, Mesh, P, S
from meshdsl.layouts.axis_rules import Rules
from meshdsl.pins import make_pins, nearly_replaced
from meshdsl.pins.conflicts import contradictions, merge
from tests.programs import F32, MESH, boundary, leaf, line

STEP = boundary(
    [leaf("params/w1", 8, 16), leaf("params/w2", 16, 8), leaf("state/m/w1", 8, 16), leaf("batch/x", 32, 8)],
    [leaf("0/w1", 8, 16), leaf("0/w2", 16, 8), leaf("1")],
)


def fault(program, layouts=None, outputs=None, mesh=MESH):
    with pytest.raises(PinError) as caught:
        make_pins(program, mesh, layouts, outputs)
    return str(caught.value)


def test_axes_not_named_are_free():
    pins = make_pins(STEP, MESH, {"batch/x": "data=S(0)"})
    assert pins.inputs == (Layout(), Layout(), Layout(), Layout(data=S(0)))


def test_a_layout_value_is_as_good_as_its_text():
    assert make_pins(STEP, MESH, {"params/w1": Layout(model=S(1))}).inputs[0] == Layout(model=S(1))


def test_the_last_glob_wins_axis_by_axis():
    pins = make_pins(STEP, MESH, {"params/**": "data=S(0) model=B", "**/w1": "model=S(1)"})
    assert pins.inputs[:3] == (Layout(data=S(0), model=S(1)), Layout(data=S(0), model=B), Layout(model=S(1)))


def test_axes_of_one_dim_are_major_first():
    pins = make_pins(STEP, MESH, {"batch/x": "model=S(0) data=S(0)"})
    assert pins.inputs[3].splitting(0) == ("model", "data")


def test_an_axis_named_again_moves_behind_the_others():
    assert merge([Layout.parse("x=S(1) y=S(1)"), Layout.parse("x=S(1)")]).splitting(1) == ("y", "x")


def test_axes_of_size_one_are_dropped():
    assert make_pins(STEP, Mesh(data=8, model=1), {"batch/x": "data=S(0) model=S(1)"}).inputs[3] == Layout(data=S(0))


def test_an_empty_layout_pins_nothing():
    assert make_pins(STEP, MESH, {"**": ""}).inputs == (Layout(),) * 4


def test_donated_inputs_are_kept():
    assert make_pins(STEP, MESH, donated=(0, 1)).donated == frozenset({0, 1})


def follows(inputs, outputs, pinned=None):
    return make_pins(boundary(inputs, outputs), MESH, None, pinned).follows


def test_outputs_follow_the_arguments_they_replace():
    assert make_pins(STEP, MESH).follows == (0, 1, None)


def test_two_results_of_one_structure_follow_two_arguments_in_order():
    both = [leaf("params/w", 4), leaf("mean/w", 4), leaf("batch", 8)]
    assert follows(both, [leaf("0/w", 4), leaf("1/w", 4), leaf("2/w", 4)]) == (0, 1, None)


def test_a_single_result_follows():
    assert follows([leaf("w", 4, 4), leaf("x", 8)], [leaf("", 4, 4)]) == (0,)


def test_a_whole_state_follows():
    state = [leaf("state/params/w", 4), leaf("state/step")]
    assert follows([*state, leaf("x", 8)], [leaf("params/w", 4), leaf("step")]) == (0, 1)


def test_a_nested_result_follows():
    inputs = [leaf("carry/0/w", 4), leaf("carry/1/m", 4), leaf("x", 8)]
    assert follows(inputs, [leaf("0/0/w", 4), leaf("0/1/m", 4), leaf("1")]) == (0, 1, None)


def test_another_dtype_or_key_does_not_follow():
    assert follows([leaf("w", 4)], [leaf("0", 4, dtype="bfloat16")]) == (None,)
    assert follows([leaf("p/a", 4)], [leaf("0/b", 4)]) == (None,)


def test_a_state_of_which_one_leaf_changes_its_type_is_noted():
    state, x = [leaf("state/m", 8), leaf("state/n"), leaf("state/v", 8)], leaf("x", 8)
    new = [leaf("0/m", 8), leaf("0/n", dtype="bfloat16"), leaf("0/v", 8), leaf("1")]
    (note,) = nearly_replaced(boundary([*state, x], new))
    assert note == "state is not replaced, and both are held: state/n is float32[], and 0/n bfloat16[]"
    assert not nearly_replaced(boundary([*state, x], [leaf("0/m", 8), leaf("0/n"), leaf("0/v", 8), leaf("1")]))
    assert not nearly_replaced(boundary([*state, x], [leaf("0/m", 4), leaf("0/n"), leaf("0/v", 4)]))


def test_starred_arguments_follow_one_by_one():
    inputs = [leaf("args/0/w", 4), leaf("args/1/x", 8)]
    assert follows(inputs, [leaf("0/x", 8), leaf("1/w", 4)]) == (1, 0)


def test_a_pinned_output_follows_nothing():
    assert follows([leaf("w", 4, 4)], [leaf("0", 4, 4)], {"0": "data=S(1)"}) == (None,)


def test_all_faults_at_once():
    layouts = {
        "batch": "data=S(0)",
        "params/w1": "dta=S(0) model=P",
        "**/x": "data=S(4)",
        "q": "data=S(",
        "params/w2": "data=S(rows)",
    }
    assert fault(STEP, layouts, {"3": "data=B", "1": "data=S(0)"}) == (
        "the pins of step do not fit, on mesh data=4,model=2:\n"
        "  layouts['q']: ')' was expected\n"
        "    data=S(\n"
        "           ^\n"
        "  layouts['params/w1']: no axis 'dta' in the mesh; did you mean 'data'?\n"
        "  layouts['params/w1']: model=P: an input cannot be partial (P); only S and B cross the boundary of a step\n"
        "  layouts['**/x']: batch/x float32[32,8]: data=S(4) is out of range; its dims are 0 to 1\n"
        "  layouts['params/w2']: params/w2 float32[16,8]: data=S(rows) names a dim, but the array has no named dims; "
        "its dims are 0 to 1\n"
        "  layouts['batch']: matches no input; did you mean 'batch/**'?\n"
        "  layouts['q']: matches no input; known: params, state, batch\n"
        "  outputs['1']: 1 float32[]: data=S(0) is out of range; it is a scalar and cannot be split\n"
        "  outputs['3']: matches no output; known: 0, 1\n"
        "arguments: params, state, batch; '*' is one path component, '**' any number"
    )


@pytest.mark.parametrize(
    ("size", "pin", "said"),
    [
        (6, "data=S(0)", "dim 0 of size 6 does not divide over data=4; nearest sizes that work: 4, 8"),
        (3, "data=S(0)", "dim 0 of size 3 does not divide over data=4; nearest sizes that work: 4"),
        (
            12,
            "data=S(0) model=S(0)",
            "dim 0 of size 12 does not divide over data=4 model=2 (8 blocks); nearest sizes that work: 8, 16",
        ),
    ],
)
def test_a_split_that_does_not_divide(size, pin, said):
    assert (
        fault(boundary([leaf("x", size)], []), {"x": pin}).splitlines()[1]
        == f"  layouts['x']: x float32[{size}]: {said}"
    )


def test_pins_that_fit_alone_and_not_together():
    text = fault(boundary([leaf("x", 4)], []), {"**": "data=S(0)", "x": "model=S(0)"})
    assert text.splitlines()[1] == (
        "  layouts: contradictory pins, '**' says data=S(0), 'x' says model=S(0): x float32[4]: "
        "dim 0 of size 4 does not divide over data=4 model=2 (8 blocks); nearest sizes that work: 8"
    )


def test_the_smallest_set_of_pins_that_contradict_is_named_for_every_contradiction():
    program = boundary([leaf("x", 4, 4)], [])
    axes = Mesh(a=2, b=2, c=2, d=4, e=2)
    pins = {"**": "e=S(0) a=B", "*": "a=S(0)", "**/x": "b=B c=S(1)", "x": "d=S(1) e=B"}
    assert fault(program, pins, mesh=axes).splitlines()[1:-1] == [
        "  layouts: contradictory pins, '**/x' says b=B c=S(1), 'x' says d=S(1) e=B: x float32[4,4]: dim 1 of size 4 "
        "does not divide over c=2 d=4 (8 blocks); nearest sizes that work: 8"
    ]


def test_rules_and_pins_that_contradict_are_named_by_entry():
    program = boundary([Leaf("x", (4, 8), F32, dims=("batch", "embed"))], [])
    with pytest.raises(PinError) as caught:
        make_pins(program, Mesh(a=2, b=2, c=2), {"*": "c=S(batch)"}, rules=Rules("batch:(a,b) embed:c"))
    assert str(caught.value).splitlines()[1] == (
        "  layouts: contradictory pins, rule batch:(a,b) says a=S(0) b=S(0), '*' says c=S(0): "
        "x float32[batch=4 embed=8]: dim batch of size 4 does not divide over a=2 b=2 c=2 (8 blocks); "
        "nearest sizes that work: 8"
    )


def test_contradictory_pins_of_many_leaves_are_counted():
    text = fault(boundary([leaf(f"p/{i}", 4) for i in range(9)], []), {"p/*": "data=S(0)", "**": "model=S(0)"})
    assert sum("contradictory" in row for row in text.splitlines()) == 4
    assert "says model=S(0): ... and 6 more" in text


def _splits_too_much(sizes, length):
    return lambda pin: ["too much"] if length % prod(sizes[axis] for axis in pin.splitting(0)) else []


@settings(deadline=None)
@given(st.lists(st.dictionaries(st.sampled_from("abcde"), st.sampled_from([B, S(0)]), min_size=1), max_size=5))
def test_no_pin_of_a_set_that_contradicts_can_be_left_out_and_no_set_is_smaller(stated):
    pins = [(str(i), Layout(**pin)) for i, pin in enumerate(stated)]
    wrong = _splits_too_much({"a": 2, "b": 2, "c": 4, "d": 8, "e": 3}, 24)
    found = [said for said, _ in contradictions(pins, wrong)]
    merged = merge(pin for _, pin in pins)
    assert bool(found) == bool(wrong(merged))
    if found:
        by_pin = [
            {a for a, _ in p.placements if merged.on(a) is S(0) and _decides(pins, i, a)}
            for i, (_, p) in enumerate(pins)
        ]
        sizes = [
            size
            for size in range(len(pins) + 1)
            for some in combinations(by_pin, size)
            if wrong(Layout(**dict.fromkeys(set().union(*some), S(0))))
        ]
        assert found[0].count("says") == sizes[0]


def _decides(pins, i, axis):
    return not any(axis in pin.axes for _, pin in pins[i + 1 :])


def test_many_leaves_at_fault_are_counted():
    text = fault(boundary([leaf(f"p/{i}", 3) for i in range(9)], []), {"p/*": "data=S(0)"})
    assert [row.split(":")[0] for row in text.splitlines()[1:4]] == ["  layouts['p/*']"] * 3
    assert text.splitlines()[4] == "  layouts['p/*']: ... and 6 more like it"


def constrained(shape, layout):
    x, y = Value(0, shape, F32), Value(1, shape, F32)
    ops = (
        Op(0, "constrain", None, {"layout": layout, "names": ()}, (x,), (y,), line(7)),
        Op(1, "return", None, {}, (y,), ()),
    )
    return TracedProgram(Graph((x,), ops), (leaf("x", *shape),), (leaf("", *shape),))


def test_constrain_is_checked_with_its_line():
    text = fault(constrained((6, 4), Layout(data=S(0), modle=B)))
    assert text.splitlines()[1:3] == [
        "  constrain at model.py:7: no axis 'modle' in the mesh; did you mean 'model'?",
        "  constrain at model.py:7: a value float32[6,4]: dim 0 of size 6 does not divide over data=4; "
        "nearest sizes that work: 4, 8",
    ]


def test_one_value_that_is_partial_in_two_ways():
    text = fault(constrained((8, 4), Layout(data=P, model=P("max"))))
    assert text.splitlines()[1] == (
        "  constrain at model.py:7: data=P and model=P(max) contradict: a value is partial in one way only"
    )
    assert make_pins(constrained((8, 4), Layout(data=P, model=P("max"))), Mesh(data=8, model=1)).inputs


def test_constrain_may_state_a_partial():
    assert make_pins(constrained((8, 4), Layout(data=P)), MESH).inputs == (Layout(),)
