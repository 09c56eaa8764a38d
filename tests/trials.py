"""Run one operation on simulated devices, in many placements at once.

``jax.vmap`` with an axis name stands for the devices of a mesh axis, so what runs are the
real local programs. All trials of an operation are compiled together, and trials whose
blocks have the same shapes share one evaluation: compiling is what costs time here.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from meshdsl.ir import Literal, Op, Value
from meshdsl.layouts.layout import Layout
from meshdsl.layouts.placement import Placement
from meshdsl.layouts.rule import Row
from meshdsl.lowering.local import Local, run_local
from meshdsl.lowering.local.registry import PROGRAMS
from tests import simulated

jax.config.update("jax_traceback_filtering", "off")  # most trials fail to trace, and filtering costs 1 ms each

AXES = ("x", "y")
NO_PROGRAM = (TypeError, ValueError, ZeroDivisionError, NotImplementedError, AssertionError, IndexError, KeyError)
OPTIONS = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}

Draws = Mapping[int, simulated.Array]


@dataclass(frozen=True)
class Trial:
    """A row per axis, and the devices per axis."""

    rows: tuple[Row, ...]
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        return f"on {' by '.join(map(str, self.ranks))} devices: {' and '.join(map(str, self.rows))}"


Results = Mapping[Trial, tuple[simulated.Array, ...]]


def run_trials(op: Op, draws: Draws, trials: Sequence[Trial], rng: simulated.Random) -> Results:
    """The devices' results per trial, stacked; trials that no local program can run are absent.

    Args:
      draws: per operand that is no literal, [draws, ...].
    """
    stacks = {trial: _cut(draws, trial, rng) for trial in trials}
    groups = _grouped(op, stacks)
    compiled = jax.jit(lambda given: _everything(op, groups, tuple(draws), given))
    merged = [_merged([stacks[trial] for trial in group]) for group in groups]
    found = compiled.lower(merged).compile(compiler_options=OPTIONS)(merged)
    return {trial: result for i, results in found.items() for trial, result in _unmerged(groups[i], results)}


def _cut(draws: Draws, trial: Trial, rng: simulated.Random) -> list[simulated.Array]:
    def placed(i: int) -> tuple[Placement, ...]:
        return tuple(row.inputs[i] for row in trial.rows)

    return [simulated.cut(draw, placed(i), trial.ranks, rng) for i, draw in draws.items()]


def _grouped(op: Op, stacks: Mapping[Trial, list[simulated.Array]]) -> list[list[Trial]]:
    """Trials that run the same local program on the same shapes."""
    groups: dict[Any, list[Trial]] = {}
    for trial, given in stacks.items():
        shapes = (trial.ranks, *(stack.shape for stack in given))
        groups.setdefault(trial if op.name in PROGRAMS else shapes, []).append(trial)
    return list(groups.values())


def _merged(group: list[list[simulated.Array]]) -> list[simulated.Array]:
    """Per operand, [trials, ranks..., draws, ...]."""
    return [np.stack(stacks) for stacks in zip(*group, strict=True)]


def _unmerged(group: list[Trial], results: Sequence[Any]) -> Iterator[tuple[Trial, tuple[simulated.Array, ...]]]:
    whole = [np.asarray(result) for result in results]
    return ((trial, tuple(result[i] for result in whole)) for i, trial in enumerate(group))


def _everything(op: Op, groups: list[list[Trial]], operands: tuple[int, ...], given: list[Any]) -> dict[int, Any]:
    found = {}
    for i, (group, stacks) in enumerate(zip(groups, given, strict=True)):
        try:
            found[i] = _on_devices(op, group, operands, stacks)
        except NO_PROGRAM:
            continue
    return found


def _on_devices(op: Op, group: list[Trial], operands: tuple[int, ...], stacks: list[Any]) -> tuple[jax.Array, ...]:
    trial, draws = group[0], stacks[0].shape[1 + len(group[0].ranks)] if stacks else 1
    where = Local(dict(zip(AXES, trial.ranks, strict=False)), *_layouts(trial.rows))

    def device(_: Any, *blocks: Any) -> tuple[Any, ...]:
        known = dict(zip(operands, blocks, strict=True))
        arrays = tuple(_operand(x, known.get(i)) for i, x in enumerate(op.inputs))
        return tuple(map(data, run_local(op, arrays, where)))

    run: Callable[..., tuple[jax.Array, ...]] = jax.vmap(device)
    for axis in reversed(AXES[: len(trial.ranks)]):
        run = jax.vmap(run, axis_name=axis)
    return jax.vmap(run)(np.zeros((len(group), *trial.ranks, draws)), *stacks)


def _layouts(rows: tuple[Row, ...]) -> tuple[tuple[Layout, ...], tuple[Layout, ...]]:
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
