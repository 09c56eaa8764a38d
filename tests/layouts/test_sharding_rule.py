"""Rows from factors and properties."""

import pytest

from meshdsl.layouts.placement import B, P, S
from meshdsl.layouts.sharding_rule import Rule, Signature


def table(rule):
    return [str(row) for row in rule.rows()]


def test_a_matrix_product():
    rule = Rule.parse("m k, k n -> m n", reduced={"k": "sum"}, linear=((0,), (1,)))
    assert table(rule) == [
        "B, B -> B",
        "S(0), B -> S(0)",
        "S(1), S(0) -> P",
        "B, S(1) -> S(1)",
        "P, B -> P",
        "B, P -> P",
    ]


def test_joint_linearity_moves_a_group_together():
    assert table(Rule.parse("_, _ -> _", linear=((0, 1),))) == ["B, B -> B", "P, P -> P"]


def test_data_movement_commutes_with_every_reduction():
    rule = Rule.parse("_ a, a -> a _", commuting=((0,),))
    assert table(rule) == [
        "B, B -> B",
        "S(1), S(0) -> S(0)",
        "P, B -> P",
        "P(max), B -> P(max)",
        "P(min), B -> P(min)",
    ]


def test_monotone_operations_keep_or_swap_bounds():
    assert table(Rule.parse("_ -> _", increasing=(0,))) == ["B -> B", "P(max) -> P(max)", "P(min) -> P(min)"]
    assert table(Rule.parse("_ -> _", decreasing=(0,))) == ["B -> B", "P(max) -> P(min)", "P(min) -> P(max)"]


def test_other_reductions_leave_their_own_parts():
    assert table(Rule.parse("a b -> a", reduced={"b": "max"})) == ["B -> B", "S(0) -> S(0)", "S(1) -> P(max)"]


def test_a_factor_that_is_neither_kept_nor_reduced_is_not_split():
    assert table(Rule.parse("a b -> a")) == ["B -> B", "S(0) -> S(0)"]


def test_a_factor_of_the_result_alone_is_made_in_blocks():
    assert table(Rule.parse("a -> n a")) == ["B -> B", "S(0) -> S(1)", "B -> S(0)"]


def test_a_factor_missing_in_one_of_two_results_is_not_split():
    assert table(Rule.parse("a b -> a, a b")) == ["B -> B, B", "S(0) -> S(0), S(0)"]


def test_merged_dims_split_through_the_major_factor_as_far_as_it_goes():
    rows = Rule.parse("(a b) c -> a (b c)", sizes={"a": 4, "b": 3}).rows()
    assert rows == (Signature((B,), (B,)), Signature((S(0),), (S(0),), 4))


def test_a_major_factor_of_length_one_does_not_count():
    rows = Rule.parse("(a b) -> a b", sizes={"a": 1, "b": 6}).rows()
    assert Signature((S(0),), (S(1),), 6) in rows


def test_rows_of_no_property_are_listed_once():
    extra = Signature((P("max"),), (P("max"),))
    assert table(Rule.parse("_ -> _", increasing=(0,), extra=(extra, extra))) == [
        "B -> B",
        "P(max) -> P(max)",
        "P(min) -> P(min)",
    ]


@pytest.mark.parametrize(
    ("text", "inputs", "outputs"),
    [
        ("a b, b -> a", ((("a",), ("b",)), (("b",),)), ((("a",),),)),
        (", a -> a", ((), (("a",),)), ((("a",),),)),
        ("(a b) _ -> ", ((("a", "b"), ()),), ((),)),
    ],
)
def test_notation(text, inputs, outputs):
    rule = Rule.parse(text)
    assert (rule.inputs, rule.outputs) == (inputs, outputs)
