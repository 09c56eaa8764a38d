"""Collectives, and the two ends of a ``jax.shard_map``: whole arrays become blocks of devices, and whole again."""

from collections.abc import Iterator, Sequence

import numpy as np

from meshdsl.lowering.hlo.collectives import replica_groups, source_target_pairs
from meshdsl.lowering.hlo.parse import ArrayType
from meshdsl.lowering.simulation.indexing import top_k
from meshdsl.lowering.simulation.interpreter import SHARD_MAP_ENDS, Devices, Function, Unfollowed, Value
from meshdsl.lowering.simulation.numbers import Array
from meshdsl.lowering.simulation.operation import Operation, Unreadable, dtype_of
from meshdsl.lowering.simulation.sharding import blocks_of, named_meshes, shardings_per_value
from meshdsl.lowering.simulation.windows import combined, folded, total


def _groups(devices: Devices, at: Operation) -> list[list[int]]:
    """The groups of a collective, each device in exactly one."""
    groups = [list(group) for group in replica_groups(at.instruction.attributes, devices.count)]
    if sorted(d for group in groups for d in group) != list(range(devices.count)):
        raise Unreadable("groups that do not hold every device once")
    if len({len(group) for group in groups}) != 1:
        raise Unreadable("groups of several sizes")
    return groups


def _all(devices: Devices, x: Array) -> Array:
    return np.broadcast_to(x, (devices.count, *x.shape[1:]))


def _each(at: Operation, arrays: Sequence[Array]) -> Value:
    """The results; of a collective that is only started, without the buffers that it names beside them."""
    tupled = at.instruction.type.startswith("(") and not at.opcode.endswith("-start")
    return tuple(arrays) if tupled or len(arrays) > 1 else arrays[0]


def _reduced(devices: Devices, at: Operation, args: Sequence[Array]) -> Iterator[Array]:
    """Per tensor, the sums (or others) over the groups, for every device."""
    groups, computation = _groups(devices, at), at.computation("to_apply")
    for x, kind in zip(args, at.kinds, strict=True):
        stacked = _all(devices, x)[np.array(groups)]  # groups, members, dims
        devices.charge(stacked.size)
        found = total(devices, kind, computation, stacked, (1,))
        if found is None:
            (found,) = folded(combined(devices, computation), [stacked], 1)
        yield _spread(groups, found)


def _spread(groups: list[list[int]], per_group: Array) -> Array:
    """What each group has, for each of its devices."""
    made = np.empty((sum(map(len, groups)), *per_group.shape[1:]), per_group.dtype)
    for group, value in zip(groups, per_group, strict=True):
        made[group] = value
    return made


def _all_reduce(devices: Devices, at: Operation, *args: Array) -> Value:
    return _each(at, list(_reduced(devices, at, args)))


def _reduce_scatter(devices: Devices, at: Operation, *args: Array) -> Value:
    groups, dim = _groups(devices, at), at.integers("dimensions")[0]
    made = []
    for x in _reduced(devices, at, args):
        part = np.empty((devices.count, *_divided(x.shape[1:], dim, len(groups[0]))), x.dtype)
        for group in groups:
            for device, block in zip(group, np.split(x[group[0]], len(group), dim), strict=True):
                part[device] = block
        made.append(part)
    return _each(at, made)


def _divided(shape: tuple[int, ...], dim: int, by: int) -> tuple[int, ...]:
    if shape[dim] % by:
        raise Unreadable("blocks of several sizes")
    return tuple(n // by if d == dim else n for d, n in enumerate(shape))


def _all_gather(devices: Devices, at: Operation, *args: Array) -> Value:
    groups, dim = _groups(devices, at), at.integers("dimensions")[0]
    return _each(
        at,
        [
            _spread(groups, np.stack([np.concatenate(list(_all(devices, x)[group]), dim) for group in groups]))
            for x in args
        ],
    )


def _all_to_all(devices: Devices, at: Operation, *args: Array) -> Value:
    groups = _groups(devices, at)
    if not at.integers("dimensions"):  # a tuple: the part for every device is an operand
        every = np.stack([_all(devices, x) for x in args])
        made = np.empty_like(every)
        for group in groups:
            for i, device in enumerate(group):
                for j, sender in enumerate(group):
                    made[j, device] = every[i, sender]
        return tuple(made)
    (dim,) = at.integers("dimensions")
    (x,) = args
    made = np.empty((devices.count, *x.shape[1:]), x.dtype)
    _divided(x.shape[1:], dim, len(groups[0]))
    for group in groups:
        parts = [np.split(_all(devices, x)[device], len(group), dim) for device in group]
        for i, device in enumerate(group):
            made[device] = np.concatenate([part[i] for part in parts], dim)
    return _each(at, [made])


def _collective_permute(devices: Devices, at: Operation, *args: Array) -> Value:
    pairs, made = source_target_pairs(at.instruction.attributes), list[Array]()
    for x in args:
        sent = _all(devices, x)
        received = np.zeros_like(sent)
        for source, target in pairs:
            received[target] = sent[source]
        made.append(received)
    return _each(at, made)


def _collective_broadcast(devices: Devices, at: Operation, x: Array) -> Array:
    made = np.zeros_like(_all(devices, x))
    for group in replica_groups(at.instruction.attributes, devices.count):
        made[list(group)] = _all(devices, x)[group[0]]
    return made


def _partition_id(devices: Devices, at: Operation) -> Array:
    return np.arange(devices.count, dtype=np.uint32)


def _replica_id(devices: Devices, at: Operation) -> Array:
    return np.zeros(1, np.uint32)


# ---- Ends of a shard_map, and other calls of the compiler ------------------------------------------------------------


def _custom_call(devices: Devices, at: Operation, *args: Array) -> Value:
    target = at.attributes["custom_call_target"].strip('"')
    if target == "SPMDFullToShardShape":
        return _entered(devices, at, args[0])
    if target == "SPMDShardToFullShape":
        return _left(devices, at, args[0])
    if target in SHARD_MAP_ENDS:
        return (_each_cut if target == SHARD_MAP_ENDS[0] else _each_joined)(devices, at, args)
    if target == "TopK":
        return top_k(devices, at, args[0])
    if target == "AllocateBuffer":
        return np.zeros((1, *at.type.dims), devices.numbers.dtype if at.kind == "float" else dtype_of(at.type.dtype))
    if target == "AssumeGatherIndicesInBound":
        return args[0]
    raise Unreadable(f"a call of {target}")


def _factors(whole: Sequence[int], local: Sequence[int]) -> tuple[int, ...]:
    """Into how many blocks each dim is cut; dims without elements are whole."""
    return tuple(n // m if m else 1 for n, m in zip(whole, local, strict=True))


def _entered(devices: Devices, at: Operation, x: Array) -> Array:
    """Blocks over the axes of a shard_map; those of other axes, which are inside them, are not cut."""
    sharding = Operation(at.read[0]).attributes.get("sharding", "{replicated}")
    whole, local = x.shape[1:], at.type.dims
    factors = _factors(whole, local)
    blocks = blocks_of(sharding, len(whole), devices.count).divided(factors)
    return np.stack(blocks.cut(x))


def _each_cut(devices: Devices, at: Operation, args: Sequence[Value]) -> Value:
    """The same of all operands of a shard_map that no partitioner has read yet."""

    def cut(x: Array, local: ArrayType, text: str) -> Array:
        factors = _factors(x.shape[1:], local.dims)
        return np.stack(blocks_of(text, len(factors), devices.count).divided(factors).cut(x))

    ends = zip(args, at.types, _stated(devices, at, "in_shardings"), strict=True)
    made = [x if isinstance(x, Unfollowed) else cut(x, local, text) for x, local, text in ends]
    return tuple(made) if at.instruction.type.startswith("(") else made[0]


def _each_joined(devices: Devices, at: Operation, args: Sequence[Value]) -> Value:
    """The whole arrays of all results of a shard_map that no partitioner has read yet."""

    def joined(x: Array, whole: ArrayType, text: str) -> Array:
        factors = _factors(whole.dims, x.shape[1:])
        return blocks_of(text, len(factors), devices.count).divided(factors).joined(_all(devices, x), whole.dims)

    ends = zip(args, at.types, _stated(devices, at, "out_shardings"), strict=True)
    made = [x if isinstance(x, Unfollowed) else joined(x, whole, text) for x, whole, text in ends]
    return tuple(made) if at.instruction.type.startswith("(") else made[0]


def _stated(devices: Devices, at: Operation, ends: str) -> list[str]:
    """The shardings at one of the ends of a shard_map."""
    attributes = at.attributes["frontend_attributes"]
    text = attributes.split(f"xla.sdy.{ends}=", 1)[1].split("]>]>", 1)[0]
    return shardings_per_value(f"{text}]>", named_meshes(devices.module.head))


def _left(devices: Devices, at: Operation, x: Array) -> Array:
    """The whole array that the blocks of a shard_map make up; inside of another one, it differs between devices."""
    whole = at.type.dims
    if "manual" in at.attributes.get("sharding", ""):
        if whole != x.shape[1:]:
            raise Unreadable("blocks of a shard_map inside another")
        return x
    factors = _factors(whole, x.shape[1:])
    blocks = blocks_of(at.attributes.get("sharding", "{replicated}"), len(whole), devices.count).divided(factors)
    return blocks.joined(_all(devices, x), whole)


FUNCTIONS: dict[str, Function] = {
    "all-reduce": _all_reduce,
    "reduce-scatter": _reduce_scatter,
    "all-gather": _all_gather,
    "all-to-all": _all_to_all,
    "collective-permute": _collective_permute,
    "collective-broadcast": _collective_broadcast,
    "partition-id": _partition_id,
    "replica-id": _replica_id,
    "custom-call": _custom_call,
}
