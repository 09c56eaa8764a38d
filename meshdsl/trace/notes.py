"""Notes: what the trace had to leave out, for the reader of the plan."""

from collections.abc import Iterable

from meshdsl.ir import Graph, Op, walk
from meshdsl.trace.alias import PLACING


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


def _sources(ops: Iterable[Op]) -> list[tuple[str, str]]:
    return list(dict.fromkeys((str(op.source), op.name) for op in ops))
