"""Notes: what the trace had to leave out, for the reader of the plan."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax

from meshdsl.ir import Graph, Op, walk
from meshdsl.trace.alias import PLACING
from meshdsl.trace.arguments import Call


def note_constraints(traced: Graph, graph: Graph) -> list[str]:
    """One line per place where a layout was stated to no effect.

    Args:
      traced: before the clean-ups.
      graph: after them.
    """
    before = [op for _, op in walk(traced)]
    left = {str(op.source) for _, op in walk(graph) if op.name == "constrain"}
    jax_stated = _sources(op for op in before if op.name in PLACING)
    stated = _sources(op for op in before if op.name == "constrain")
    return [
        *(
            f"{name} at {at} is ignored: layouts come from the plan; state one with md.constrain"
            for at, name in jax_stated
        ),
        *(f"constrain at {at} has no effect: nothing reads its result" for at, _ in stated if at not in left),
    ]


def note_lost_changes(call: Call, leaves: Sequence[Any], arguments: Any, result: Any) -> Iterator[str]:
    """A line if the step changed arguments in place and does not return the change, which is then lost.

    Args:
      leaves: what the step was given.
      arguments: what it made of that: ``(args, kwargs)``.
    """
    args, kwargs = arguments
    dynamic = [x for i, x in enumerate(args) if i not in call.static]
    after = jax.tree.leaves((dynamic, {key: x for key, x in kwargs.items() if key not in call.static}))
    if len(after) != len(leaves):
        yield "the step changes the structure of its arguments in place, which is lost: return what it changes"
        return
    returned = {id(x) for x in jax.tree.leaves(result)}
    pairs = zip(call.paths, leaves, after, strict=True)
    paths = [path for path, x, y in pairs if x is not y and id(y) not in returned]
    if paths:
        what = f"{paths[0]} changes" if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} more change"
        yield f"{what} in place, which is lost: return what the step changes"


def _sources(ops: Iterable[Op]) -> list[tuple[str, str]]:
    return list(dict.fromkeys((str(op.source), op.name) for op in ops))
