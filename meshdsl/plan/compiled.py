"""What a compiled program communicates, in the form of a plan: it is saved, loaded, compared and drawn as plans are.

It has collectives, lines, arrays at the boundary and memory. Its solution has no operations, so it cannot be run; its
seconds are those of the collectives, one after the other, and it has no lower bound.
"""

from collections.abc import Mapping, Sequence

from meshdsl.ir.solution import Solution
from meshdsl.layouts.mesh import Mesh
from meshdsl.plan.plan import Plan
from meshdsl.plan.types import Array, Collective, Line, Span, Timing, Utilization
from meshdsl.util.lazy import Lazy


def compiled_plan(
    name: str,
    mesh: Mesh,
    compiler: str,
    fingerprint: str,
    jax: str,
    arrays: tuple[Sequence[Array], Sequence[Array]],
    collectives: Sequence[Collective],
    exposed: Sequence[float],
    lines: Mapping[str, Line],
    memory: int,
    flops: float,
) -> Plan:
    """Returns the record of a compiled program.

    Args:
      name: of the step. mesh: of its devices, with the topology that seconds are predicted for.
      compiler: that compiled it, and for what.
      fingerprint: of the program that was compiled. jax: the version that lowered it.
      arrays: its inputs and outputs, as they lie.
      collectives: in program order. exposed: seconds per step of each that no product hides.
      lines: of the collectives, by their names.
      memory: bytes of one device. flops: of the products of all devices together.
    """
    inputs, outputs = arrays
    position = {source: i for i, source in enumerate(lines)}
    sent = sum(c.seconds * c.trips for c in collectives)
    spans = tuple(Span(position[c.source], c.kind, c.phase, c.trips, 0, 0.0, memory, 1) for c in collectives)
    return Plan(
        name=name,
        identity=Lazy.known(fingerprint),
        operations={},
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        collectives=tuple(collectives),
        held=(),
        notes=(),
        solution=Solution(
            mesh=mesh,
            rows={},
            layouts={i: array.layout for i, array in enumerate(inputs)},
            uses={},
            trees={},
            seconds=sent,
            lower_bound=0.0,
            peak=memory,
            peak_op=0,
        ),
        lines=tuple(lines.values()),
        timing=Lazy.known(Timing(spans, sum(exposed), Utilization(flops=flops), tuple(exposed))),
        jax=jax,
        compiled=compiler,
    )
