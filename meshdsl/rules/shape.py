"""Rules of data movement: reshapes, permutations, pads and slices.

Data movement commutes with any elementwise reduction, so partial sums, maxima and minima all pass. Dims that are
concatenated cannot be split; all others can, and so can dims that are reversed, rolled or shifted by their padding, if
the devices permute blocks or send their ends. Where few places of a dim are cut out, the device that holds them returns
them; where few are padded, the device that gets them takes them from a whole operand.
"""

from math import gcd

from meshdsl.ir.graph import Literal, Op
from meshdsl.layouts.exchange import Exchange
from meshdsl.layouts.placement import B, P, S
from meshdsl.layouts.sharding_rule import Dims, Rule, Signature
from meshdsl.rules.elementwise import is_zero
from meshdsl.rules.halo import Sliding
from meshdsl.rules.registry import masked, rule


def named(*labels: str | None) -> Dims:
    """Dims with one factor each; None is a dim that cannot be split."""
    return tuple((label,) if label else () for label in labels)


def kept(rank: int, *touched: int) -> Dims:
    """Dims ``d0 d1 ...`` in place, except for the touched ones, which cannot be split."""
    return named(*(None if i in touched else f"d{i}" for i in range(rank)))


def _rank(op: Op) -> int:
    return len(op.inputs[0].shape)


@rule("broadcast_in_dim")
def broadcast_in_dim(op: Op) -> Rule:
    """New dims are computed in blocks, as are broadcast dims of length 1. A zero is a valid part of a zero sum."""
    shape, places = op.params["shape"], op.params["broadcast_dimensions"]
    operand = op.inputs[0].shape
    source = named(*(f"d{at}" if n == shape[at] else None for n, at in zip(operand, places, strict=True)))
    parts = (Signature((B,), (P,)),) if is_zero(op.inputs[0]) else ()
    return Rule((source,), (kept(len(shape)),), commuting=((0,),), extra=parts)


@rule("iota")
def iota(op: Op) -> Rule:
    """Each device counts from the start of its block."""
    return Rule((), (kept(len(op.outputs[0].shape)),))


@rule("transpose")
def transpose(op: Op) -> Rule:
    """Dims are permuted."""
    return Rule((kept(_rank(op)),), (named(*(f"d{i}" for i in op.params["permutation"])),), commuting=((0,),))


@rule("squeeze")
def squeeze(op: Op) -> Rule:
    """Dims of length 1 are dropped."""
    gone = op.params["dimensions"]
    left = named(*(f"d{i}" for i in range(_rank(op)) if i not in gone))
    return Rule((kept(_rank(op), *gone),), (left,), commuting=((0,),))


@rule("rev")
def rev(op: Op) -> Rule:
    """Dims that are not reversed; blocks of a reversed one are mirrored."""
    turned = op.params["dimensions"]
    dims, inside = kept(_rank(op), *turned), (Exchange("mirror", 0),)
    extra = tuple(Signature((S(d),), (S(d),), collectives=inside) for d in turned)
    return Rule((dims,), (dims,), commuting=((0,),), extra=extra)


@rule("roll")
def roll(op: Op) -> Rule:
    """Dims that are not rolled; along a rolled one, blocks send their ends."""
    dim, shift = op.params["axis"], op.params["shift"]
    inside = (Exchange("cycle", 0, dim, before=shift, after=-shift),)
    dims = kept(_rank(op), dim)
    return Rule((dims,), (dims,), commuting=((0,),), extra=(Signature((S(dim),), (S(dim),), collectives=inside),))


@rule("deal")
def permute_rule(op: Op) -> Rule:
    """All dims but the first, whose elements are permuted: its blocks exchange the elements that they need."""
    dims, inside = kept(_rank(op), 0), (Exchange("deal", 0, 0, which=op.params["which"]),)
    return Rule((dims,), (dims,), commuting=((0,),), extra=(Signature((S(0),), (S(0),), collectives=inside),))


@rule("slice")
def slice_(op: Op) -> Rule:
    """Dims that are not cut, dims sliced with a matching stride, and dims that lose little at their ends.

    Of a dim of which only few places are left, each device returns those that it holds, and zeros for the others.
    """
    x, cut = (
        op.inputs[0],
        [d for d, (n, m) in enumerate(zip(op.inputs[0].shape, op.outputs[0].shape, strict=True)) if n != m],
    )
    dims, moved = kept(_rank(op), *cut), [(d, slice_windows(op, d)) for d in cut]
    extra = (
        *(Signature((S(d),), (S(d),), collectives=w.exchanges(0, d)) for d, w in moved if w.splits),
        *(Signature((S(d),), (masked(x.dtype),)) for d, w in moved if not w.splits and w.count),
    )
    return Rule((dims,), (dims,), commuting=((0,),), extra=extra)


def slice_windows(op: Op, d: int) -> Sliding:
    """The places of the result along dim d as windows of one place each."""
    stride = op.params["strides"][d] if op.params["strides"] else 1
    return Sliding(op.inputs[0].shape[d], op.outputs[0].shape[d], stride, 0, -op.params["start_indices"][d], 1)


@rule("pad")
def pad(op: Op) -> Rule:
    """Dims without padding, or shifted by it: each block sends its end to the next one.

    Along a dim that grows otherwise, a device can compute its own block from the whole operand. The padding is part of
    the value: a partial operand needs a partial or zero padding.
    """
    padded = [i for i, amounts in enumerate(op.params["padding_config"]) if any(amounts)]
    moved = [(d, pad_windows(op, d)) for d in padded]
    extra = (
        *(Signature((S(d), B), (S(d),), collectives=w.exchanges(0, d)) for d, w in moved if only_shifts(op, d)),
        *(Signature((B, B), (S(d),)) for d in padded if not only_shifts(op, d)),
    )
    dims, fill = kept(_rank(op), *padded), op.inputs[1]
    literal = isinstance(fill, Literal)
    zero = literal and is_zero(fill)
    linear, increasing = ((0,),) if zero else (), (0,) if literal else ()
    return Rule((dims, ()), (dims,), commuting=((0, 1),), linear=linear, increasing=increasing, extra=extra)


def pad_windows(op: Op, d: int) -> Sliding:
    """The places of the result along dim d as windows of one place each."""
    low, _, between = map(int, op.params["padding_config"][d])
    return Sliding(op.inputs[0].shape[d], op.outputs[0].shape[d], 1, 0, low, between + 1)


def only_shifts(op: Op, d: int) -> bool:
    """Whether a pad moves the elements of dim ``d`` so little that blocks only send their ends; else it grows."""
    low, high, inner = op.params["padding_config"][d]
    grows_at_end = low == inner == 0 < high <= op.inputs[0].shape[d]
    return pad_windows(op, d).splits and not grows_at_end


@rule("shifts")
def shifts(op: Op) -> Rule:
    """Dims along which nothing moves; along others, each block is widened by the longest moves to either side."""
    moves, results = op.params["moves"], len(op.outputs)
    halos = {d: halo for d in range(_rank(op)) if any(halo := longest_moves(op, d))}
    near = {d: halo for d, halo in halos.items() if 2 * sum(halo) <= op.inputs[0].shape[d]}
    extra = tuple(
        Signature((S(d), B), (S(d),) * results, collectives=(Exchange("window", 0, d, before=before, after=after),))
        for d, (before, after) in near.items()
    )
    dims, fill = kept(_rank(op), *halos), op.inputs[1]
    literal = isinstance(fill, Literal)
    linear, increasing = ((0,),) if literal and is_zero(fill) else (), (0,) if literal else ()
    return Rule(
        (dims, ()), (dims,) * len(moves), commuting=((0, 1),), linear=linear, increasing=increasing, extra=extra
    )


@rule("rolls")
def rolls(op: Op) -> Rule:
    """Dims along which nothing moves; along others, each block is widened, cyclically, by the longest moves."""
    halos = {d: halo for d in range(_rank(op)) if any(halo := longest_moves(op, d))}
    extra = tuple(
        Signature((S(d),), (S(d),) * len(op.outputs), collectives=(Exchange("cycle", 0, d, before=b, after=a),))
        for d, (b, a) in halos.items()
    )
    dims = kept(_rank(op), *halos)
    return Rule((dims,), (dims,) * len(op.outputs), commuting=((0,),), extra=extra)


def longest_moves(op: Op, d: int) -> tuple[int, int]:
    """Returns how far ``shifts`` or ``rolls`` moves its operand along dim d: at most forward, at most backward."""
    along = [move[d] for move in op.params["moves"]]
    return max(0, *along), max(0, *(-by for by in along))


@rule("bitcast_convert_type")
def bitcast_convert_type(op: Op) -> Rule:
    """Elements of another width are split into, or joined from, a last dim."""
    ranks = [len(x.shape) for x in (*op.inputs, *op.outputs)]
    shared = kept(min(ranks))
    source, result = ((*shared, *((),) * (rank - len(shared))) for rank in ranks)
    return Rule((source,), (result,))


@rule("concatenate")
def concatenate(op: Op) -> Rule:
    """Dims other than the concatenated one."""
    dims = kept(_rank(op), op.params["dimension"])
    return Rule((dims,) * len(op.inputs), (dims,), commuting=(tuple(range(len(op.inputs))),))


@rule("split")
def split(op: Op) -> Rule:
    """Dims other than the one that is cut."""
    dims = kept(_rank(op), op.params["axis"])
    return Rule((dims,), (dims,) * len(op.outputs), commuting=((0,),))


@rule("stack")
def stack(op: Op) -> Rule:
    """The operands' dims; the new one cannot be split."""
    dims, at = kept(_rank(op)), op.params["axis"]
    whole = (*dims[:at], (), *dims[at:])
    return Rule((dims,) * len(op.inputs), (whole,), commuting=(tuple(range(len(op.inputs))),))


@rule("unstack")
def unstack(op: Op) -> Rule:
    """Dims other than the one that is unstacked."""
    at = op.params["axis"]
    dims = kept(_rank(op), at)
    return Rule((dims,), ((*dims[:at], *dims[at + 1 :]),) * len(op.outputs), commuting=((0,),))


@rule("tile")
def tile(op: Op) -> Rule:
    """Dims that are not repeated."""
    dims = kept(_rank(op), *(i for i, times in enumerate(op.params["reps"]) if times != 1))
    return Rule((dims,), (dims,), commuting=((0,),))


@rule("reshape")
def reshape(op: Op) -> Rule:
    """The common factors of operand and result, row major.

    Both shapes are read from the left; while they are aligned, the greatest common divisor of the current dims is a
    factor of both: (12, 6) -> (4, 18) is ``(a b) c -> a (b c)``. Blocks of a minor factor are contiguous where the
    factors in front of it are divided fully.
    """
    before, after = op.inputs[0].shape, op.outputs[0].shape
    order = op.params["dimensions"] or range(len(before))
    read, right, sizes = common_factors(tuple(before[i] for i in order), after)
    left = tuple(read[list(order).index(i)] for i in range(len(before)))
    return Rule((left,), (right,), commuting=((0,),), sizes=sizes, nested=True)


def common_factors(before: tuple[int, ...], after: tuple[int, ...]) -> tuple[Dims, Dims, dict[str, int]]:
    """Returns the factors of each dim of both shapes, and the sizes of factors that do not fill their dims."""
    dims: tuple[list[list[str]], ...] = ([[] for _ in before], [[] for _ in after])
    rest = (list(before), list(after))
    at: list[int] = [0, 0]
    sizes: dict[str, int] = {}
    whole: set[str] = set()
    while at[0] < len(before) and at[1] < len(after):
        n, m = rest[0][at[0]], rest[1][at[1]]
        size = gcd(n, m)
        if n * m == 0 or (size == 1 and n != 1 and m != 1):
            break  # from here on the dims do not align
        if size > 1:
            name = f"f{len(sizes)}"
            sizes[name] = size
            if size == before[at[0]] == after[at[1]]:
                whole.add(name)
            dims[0][at[0]].append(name)
            dims[1][at[1]].append(name)
        for side in (0, 1):
            rest[side][at[side]] //= size
            at[side] += rest[side][at[side]] == 1
    left, right = (tuple(map(tuple, side)) for side in dims)
    return left, right, {name: size for name, size in sizes.items() if name not in whole}
