"""Run one operation on simulated devices, in many placements at once.

``jax.vmap`` with an axis name stands for the devices of a mesh axis, so what runs are the
real local programs. All trials of an operation are compiled together, and trials whose
blocks have the same shapes share one evaluation: compiling is what costs time here.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from math import prod
from typing import Any

import jax
import numpy as np

from meshdsl.custom_rules import simulate as simulated
from meshdsl.ir.graph import Literal, Op, Value
from meshdsl.layouts.layout import Layout
from meshdsl.layouts.placement import B, P, Partial, Placement
from meshdsl.layouts.sharding_rule import Signature
from meshdsl.lowering.local import Local, run_local
from meshdsl.lowering.local.registry import PROGRAMS

jax.config.update("jax_traceback_filtering", "off")  # most trials fail to trace, and filtering costs 1 ms each

AXES = ("x", "y")
NO_PROGRAM = (TypeError, ValueError, ZeroDivisionError, NotImplementedError, AssertionError, IndexError, KeyError)
CHEAP = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
CHEAPER = {**CHEAP, "xla_cpu_parallel_codegen_split_count": 1, "xla_cpu_use_fusion_emitters": False}

Draws = Mapping[int, simulated.Array]


@dataclass(frozen=True)
class Trial:
    """A row per axis, and the devices per axis."""

    rows: tuple[Signature, ...]
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        return f"on {' by '.join(map(str, self.ranks))} devices: {' and '.join(map(str, self.rows))}"


Results = Mapping[Trial, tuple[simulated.Array, ...]]
Work = tuple[list[Trial], Sequence[Any]]  # a group, with its blocks or its results


def run_trials(op: Op, draws: Draws, trials: Sequence[Trial], rng: simulated.Random) -> Results:
    """The devices' results per trial, stacked; trials that no local program can run are absent.

    Args:
      draws: per operand that is no literal, [draws, ...].
    """
    cut = cache(lambda i, placed, ranks: simulated.cut(draws[i], placed, ranks, rng))
    stacks = {trial: [cut(i, _placed(trial, i), trial.ranks) for i in draws] for trial in trials}
    groups = _grouped(op, stacks)
    found = _computed(op, tuple(draws), [(group, _merged(group, stacks)) for group in groups])
    count = len(next(iter(draws.values()), [0]))
    return {trial: result for group, results in found for trial, result in _unmerged(group, results, count)}


def _computed(op: Op, operands: tuple[int, ...], work: list[Work]) -> list[Work]:
    """The results of every group that runs; halves it until the ones that do not compile are alone."""
    try:
        run = jax.jit(lambda given: _everything(op, operands, [group for group, _ in work], given))
        given = [blocks for _, blocks in work]
        found = jax.block_until_ready(run.lower(given).compile(compiler_options=fast_options())(given))
    except Exception:  # of many kinds: a primitive bound to shapes that it does not check, a library that fails on them
        half = len(work) // 2
        return _computed(op, operands, work[:half]) + _computed(op, operands, work[half:]) if half else []
    return [(work[i][0], results) for i, results in found.items()]


@cache
def fast_options() -> dict[str, bool | int]:
    """Compiler options that compile fast; XLA drops such options now and then."""
    try:
        jax.jit(lambda x: x + 1).lower(1.0).compile(compiler_options=CHEAPER)
    except jax.errors.JaxRuntimeError:
        return CHEAP
    return CHEAPER


def _placed(trial: Trial, i: int) -> tuple[Placement, ...]:
    """Placements of operand i, one per axis."""
    return tuple(row.inputs[i] for row in trial.rows)


def _grouped(op: Op, stacks: Mapping[Trial, list[simulated.Array]]) -> list[list[Trial]]:
    """Trials that run the same local program on blocks of the same shapes."""
    groups: dict[Any, list[Trial]] = {}
    for trial, given in stacks.items():
        blocks = tuple(stack.shape[len(trial.ranks) + 1 :] for stack in given)
        groups.setdefault((told(trial), blocks) if op.name in PROGRAMS else blocks, []).append(trial)
    return list(groups.values())


def told(trial: Trial) -> Trial:
    """What a local program may ask: where its blocks lie, and which of its results are summed."""
    rows = (
        Signature(
            tuple(B if isinstance(placed, Partial) else placed for placed in row.inputs),
            tuple(B if isinstance(placed, Partial) and placed is not P else placed for placed in row.outputs),
            collectives=row.collectives,
        )
        for row in trial.rows
    )
    return Trial(tuple(rows), trial.ranks)


def _merged(group: list[Trial], stacks: Mapping[Trial, list[simulated.Array]]) -> list[simulated.Array]:
    """Per operand, the blocks of all trials, devices and draws: [blocks, ...]."""
    flat = ([_flat(stack, len(trial.ranks) + 1) for stack in stacks[trial]] for trial in group)
    return [np.concatenate(blocks) for blocks in zip(*flat, strict=True)]


def _flat(stack: Any, leading: int) -> Any:
    return stack.reshape(-1, *stack.shape[leading:])


def _unmerged(
    group: list[Trial], results: Sequence[Any], draws: int
) -> Iterator[tuple[Trial, tuple[simulated.Array, ...]]]:
    whole, at = [np.asarray(result) for result in results], 0
    for trial in group:
        count = prod(trial.ranks) * draws
        yield trial, tuple(x[at : at + count].reshape(*trial.ranks, draws, *x.shape[1:]) for x in whole)
        at += count


def _everything(op: Op, operands: tuple[int, ...], groups: list[list[Trial]], given: list[Any]) -> dict[int, Any]:
    found = {}
    for i, (group, blocks) in enumerate(zip(groups, given, strict=True)):
        try:
            run = _program(group[0]) if op.name in PROGRAMS else _anywhere
            found[i] = run(op, group, operands, blocks)
        except NO_PROGRAM:
            continue
    return found


def _anywhere(op: Op, group: list[Trial], operands: tuple[int, ...], blocks: list[Any]) -> tuple[jax.Array, ...]:
    """A local program that does not ask where it runs, on every block."""
    return jax.vmap(_device(op, group[0], operands))(None if blocks else np.zeros(1), *blocks)


def _program(trial: Trial) -> Callable[..., tuple[jax.Array, ...]]:
    """``vmap`` runs collectives over one named axis only; those over two need real devices."""
    together = len(trial.ranks) > 1 and any(row.collectives for row in trial.rows)
    return _on_mesh if together else _on_devices


def _on_mesh(op: Op, group: list[Trial], operands: tuple[int, ...], blocks: list[Any]) -> tuple[jax.Array, ...]:
    """A local program on a mesh of virtual devices, for each trial and draw."""
    ranks, count = group[0].ranks, len(group)
    auto = (jax.sharding.AxisType.Auto,) * len(ranks)
    mesh = jax.make_mesh(ranks, AXES, auto, devices=jax.devices()[: prod(ranks)])
    run = jax.vmap(jax.vmap(partial(_device(op, told(group[0]), operands), None)))
    spec = jax.sharding.PartitionSpec(*AXES)

    def device(*held: Any) -> tuple[jax.Array, ...]:
        return tuple(x[None, None] for x in run(*(x[0, 0] for x in held)))

    stacks = [np.moveaxis(block.reshape(count, *ranks, -1, *block.shape[1:]), 0, 2) for block in blocks]
    results = jax.shard_map(device, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)(*stacks)
    return tuple(_flat(jax.numpy.moveaxis(result, 2, 0), len(ranks) + 2) for result in results)


def _on_devices(op: Op, group: list[Trial], operands: tuple[int, ...], blocks: list[Any]) -> tuple[jax.Array, ...]:
    """A local program under one named axis per mesh axis, for each trial and draw."""
    ranks, trial = group[0].ranks, told(group[0])
    run: Callable[..., tuple[jax.Array, ...]] = jax.vmap(_device(op, trial, operands))
    for axis in reversed(AXES[: len(ranks)]):
        run = jax.vmap(run, axis_name=axis)
    stacks = [block.reshape(len(group), *ranks, -1, *block.shape[1:]) for block in blocks]
    draws = stacks[0].shape[len(ranks) + 1] if stacks else 1
    results = jax.vmap(run)(np.zeros((len(group), *ranks, draws)), *stacks)
    return tuple(_flat(result, len(ranks) + 2) for result in results)


def _device(op: Op, trial: Trial, operands: tuple[int, ...]) -> Callable[..., tuple[jax.Array, ...]]:
    """What one device runs; the first argument only says how many devices there are."""
    where = Local(dict(zip(AXES, trial.ranks, strict=False)), *_layouts(trial.rows))

    def device(_: Any, *blocks: Any) -> tuple[Any, ...]:
        known = dict(zip(operands, blocks, strict=True))
        arrays = tuple(_operand(x, known.get(i)) for i, x in enumerate(op.inputs))
        return tuple(map(data, run_local(op, arrays, where)))

    return device


def _layouts(rows: tuple[Signature, ...]) -> tuple[tuple[Layout, ...], tuple[Layout, ...]]:
    def of(ports: Iterator[tuple[Placement, ...]]) -> tuple[Layout, ...]:
        return tuple(Layout(**dict(zip(AXES, placed, strict=False))) for placed in ports)

    return of(zip(*(row.inputs for row in rows), strict=True)), of(zip(*(row.outputs for row in rows), strict=True))


def _operand(port: Value | Literal, block: Any) -> Any:
    if isinstance(port, Literal):
        return np.asarray(port.value, port.dtype)
    return jax.random.wrap_key_data(block) if is_key(port.dtype) else block


def is_key(dtype: Any) -> bool:
    """Whether values of this dtype are PRNG keys."""
    return bool(jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key))


def data(array: Any) -> Any:
    """Key data of keys; other arrays as they are."""
    return jax.random.key_data(array) if is_key(array.dtype) else array
