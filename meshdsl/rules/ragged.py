"""The rule of ragged matmuls: rows in groups, one matrix per group (mixtures of experts).

    lhs [rows, k], rhs [group, k, n], sizes [group] -> [rows, n]      the experts' outputs
    lhs [k, rows], rhs [rows, n],     sizes [group] -> [group, k, n]  their weight gradients

Which rows belong to which group is known only at run time, so neither rows nor groups can be
split; every other dim is as in a matmul.
"""

from meshdsl.ir import Op
from meshdsl.layouts.rule import Rule
from meshdsl.rules.contraction import bilinear
from meshdsl.rules.registry import rule
from meshdsl.rules.structural import kept, named


@rule("ragged_dot_general")
def ragged_dot(op: Op) -> Rule:
    """Bilinear; contracted dims give partial sums. Sizes that differ from batch to batch keep all dims whole."""
    if len(op.inputs[2].shape) > 1:
        return Rule(tuple(kept(0) for _ in op.inputs), (kept(0),), linear=bilinear(op))
    numbers = op.params["ragged_dot_dimension_numbers"]
    (left_sum, right_sum), (left_batch, right_batch) = numbers.dot_dimension_numbers
    (rows,), groups = numbers.lhs_ragged_dimensions, tuple(numbers.rhs_group_dimensions)
    pairs = [(f"k{i}", *dims) for i, dims in enumerate(zip(left_sum, right_sum, strict=True))]
    pairs += [(f"b{i}", *dims) for i, dims in enumerate(zip(left_batch, right_batch, strict=True))]
    common = [pair for pair in pairs if pair[1] != rows]
    left = _labels("m", len(op.inputs[0].shape), {i: name for name, i, _ in common}, {rows})
    ragged_right = {j for _, i, j in pairs if i == rows}
    right = _labels("n", len(op.inputs[1].shape), {j: name for name, _, j in common}, {*groups, *ragged_right})
    made = (
        *([None] if rows in left_sum else []),
        *(left[i] for i in left_batch),
        *(name for i, name in enumerate(left) if i not in (*left_sum, *left_batch)),
        *(name for i, name in enumerate(right) if i not in (*right_sum, *right_batch, *groups)),
    )
    reduced = {name: "sum" for name, _, _ in common if name.startswith("k")}
    return Rule((named(*left), named(*right), ((),)), (named(*made),), reduced=reduced, linear=bilinear(op))


def _labels(free: str, rank: int, shared: dict[int, str], whole: set[int]) -> tuple[str | None, ...]:
    """A label per dim: a shared one, none, or one of its own."""
    return tuple(None if i in whole else shared.get(i, f"{free}{i}") for i in range(rank))
