"""Rows from factors and properties."""

from itertools import product
from math import prod

import numpy as np
import pytest

from meshdsl.layouts.placement import B, P, S
from meshdsl.layouts.sharding_rule import Rule, Signature, divides


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


def test_a_nested_rule_splits_minor_factors_behind_major_ones():
    rows = Rule.parse("(a b) c -> a (b c)", sizes={"a": 4, "b": 3, "c": 5}, nested=True).rows()
    minor = Signature((S(0),), (S(1),), 3, majors=(4, 1)), Signature((S(1),), (S(1),), 5, majors=(1, 3))
    assert rows[2:] == minor and [row.part(0) for row in rows] == [(1, 0), (1, 4), (4, 3), (1, 5)]


@pytest.mark.parametrize("factors", [(4, 6), (2, 4, 3), (6, 2)])
def test_parts_of_a_merged_dim_divide_it_where_their_blocks_are_contiguous(factors):
    """Tried on every assignment of up to three axes to the factors, with the blocks of each factor cut out."""
    parts = [(prod(factors[:i]), n) for i, n in enumerate(factors)]
    whole, seen = np.arange(prod(factors)).reshape(factors), set()
    for sizes in product((2, 3, 4), (2, 3), (1, 2)):
        for at in product(range(len(factors)), repeat=3):
            splits = [(k, parts[f]) for k, f in zip(sizes, at, strict=True) if k > 1]
            shares = [prod(k for k, f in zip(sizes, at, strict=True) if f == g) for g in range(len(factors))]
            exact = not any(n % k for n, k in zip(factors, shares, strict=True))
            blocks = whole.reshape(-1, whole.size // prod(sizes)) if exact else None
            right = exact and all(
                np.array_equal(_block(whole, zip(sizes, at, place, strict=True)).ravel(), blocks[n])
                for n, place in enumerate(product(*map(range, sizes)))
            )
            assert divides(whole.size, splits) == right, (sizes, at)
            seen.add(right)
    assert seen == {True, False}


def _block(x, splits):
    """The part of ``x`` of one device: blocks of factors, blocks of these, and so on."""
    for k, factor, place in splits:
        x = np.split(x, k, factor)[place]
    return x


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
