"""Python time per call, against plain jax.jit: shapes in turn, static arguments, keywords, trees, numpy batches.

python -m bench.calls --rounds 300

The steps do next to nothing, so a call takes as long as Python and jax need to pass arguments and results on. Both
functions are called in turn in one process, with the same arguments, placed as planned; what is timed is the call until
it returns, before its results are there. The median of all rounds is reported, and the 10th percentile beside it; the
least would compare the luckiest wake-ups of the devices' threads, which differ by a third from run to run.
"""

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.report import machine, table
from meshdsl.api import parallelize

GOAL = 1.2  # times the time of jax.jit
LAYOUTS = {"batch": "data=S(0)"}
Arguments = tuple[tuple[Any, ...], Mapping[str, Any]]


def step(params: Any, batch: Any, mode: str = "train", *, rate: Any = 0.5) -> Any:
    """Returns new parameters."""
    change = batch.sum() * (rate if mode == "train" else 0)
    return jax.tree.map(lambda w: w + change, params)


@dataclass(frozen=True)
class Case:
    """Calls that take turns.

    Args:
      calls: arguments and keywords of each.
      static: the static arguments.
      numpy: batches stay numpy arrays, in place of arrays that are placed as planned; jax.jit gets the planned
        shardings, since it would copy all of a batch to each device.
      donated: the parameters are, so each call takes the result of the one before.
    """

    name: str
    calls: Sequence[Arguments]
    static: tuple[str, ...] = ()
    numpy: bool = False
    donated: bool = False


def cases() -> list[Case]:
    """Returns one case per kind of call, for trees of 2 and of 200 arrays."""
    few, many = (np.ones((8, 8), np.float32),), {f"w{i}": np.ones((8, 8), np.float32) for i in range(200)}
    short, long = np.ones((16, 8), np.float32), np.ones((32, 8), np.float32)
    modes = [((None, short, mode), {}) for mode in ("train", "eval")]
    kinds = [
        Case("one shape", [((None, short), {})]),
        Case("two shapes in turn", [((None, short), {}), ((None, long), {})]),
        Case("a static argument", modes[:1], ("mode",)),
        Case("two static values in turn", modes, ("mode",)),
        Case("keywords", [((None,), {"batch": short, "rate": np.float32(0.5)})]),
        Case("a Python number", [((None, short), {"rate": 0.25})]),
        Case("a numpy batch", [((None, short), {})], numpy=True),
        Case("donated", [((None, short), {})], donated=True),
    ]
    return [
        replace(case, name=f"{name}, {case.name}", calls=[((params, *args[1:]), named) for args, named in case.calls])
        for name, params in (("2 arrays", few), ("201 arrays", many))
        for case in kinds
    ]


def measure(case: Case, mesh: str, rounds: int) -> dict[str, np.ndarray]:
    """Returns the seconds of every call of a round, ours and those of ``jax.jit``."""
    donated = {"donate_argnums": (0,)} if case.donated else {}
    ours = parallelize(step, mesh, LAYOUTS, static_argnames=case.static, **donated)
    args, keywords = case.calls[0]
    shardings = {"in_shardings": ours.input_shardings(*args, **keywords)[0]} if case.numpy else {}
    steps = {"meshdsl": ours, "jax.jit": jax.jit(step, static_argnames=case.static, **donated, **shardings)}
    calls = {name: [_placed(ours, args, case.numpy) for args in case.calls] for name in steps}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for warm_up in (*[True] * 3, *[False] * rounds):
        for name, function in steps.items():
            spent, results = _timed(function, calls[name])
            if case.donated:
                (_, *rest), keywords = calls[name][0]
                calls[name] = [((results[0], *rest), keywords)]
            if not warm_up:
                seconds[name].append(spent / len(results))
    return {name: np.array(times) for name, times in seconds.items()}


def _placed(ours: Any, arguments: Arguments, keep_numpy: bool) -> Arguments:
    """Copies of arguments, placed as planned; numbers as they are, numpy batches if they are to stay."""
    args, keywords = arguments
    places, named = ours.input_shardings(*args, **keywords)

    def put(x: Any, at: Any) -> Any:
        if isinstance(x, str | float) or (keep_numpy and isinstance(x, np.ndarray)):
            return x
        return jax.tree.map(lambda leaf, to: jax.device_put(jnp.array(leaf), to), x, at)

    return tuple(map(put, args, places)), {name: put(x, named[name]) for name, x in keywords.items()}


def _timed(function: Callable[..., Any], calls: Sequence[Arguments]) -> tuple[float, list[Any]]:
    spent, results = 0.0, []
    for args, keywords in calls:
        start = time.perf_counter()
        result = function(*args, **keywords)
        spent += time.perf_counter() - start
        results.append(jax.block_until_ready(result))
    return spent, results


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--mesh", default="data=8")
    options = parser.parse_args()
    rows = []
    for case in cases():
        seconds = measure(case, options.mesh, options.rounds)
        median, low = ({name: np.percentile(x, at) * 1e6 for name, x in seconds.items()} for at in (50, 10))
        figures = [f"{median[name]:.0f} ({low[name]:.0f})" for name in seconds]
        ratios = [each["meshdsl"] / each["jax.jit"] for each in (median, low)]
        rows.append((case.name, *figures, f"{ratios[0]:.2f} ({ratios[1]:.2f})"))
    title = ("calls", "meshdsl, us (10th percentile)", "jax.jit, us (10th percentile)", f"ratio, at most {GOAL}")
    print(table(title, rows))
    print(f"\nmedian of {options.rounds} interleaved rounds on {options.mesh}; {machine()}")


if __name__ == "__main__":
    main()
