"""Which gathers and reductions of a plan are sent as rings, and what that costs and saves (``meshdsl.ir.rings``).

A ring of ``k`` parts, each as long as ``part``, replaces a collective and the products that wait for it, or that it
waits for:

    collective + products     -->     (k - 1) max(hop, part) + part

or, with blocks that go both ways around, about half as many steps of two parts (``ProductRing.schedule``).

This holds if the compiler sends permutes beside products, which the topology knows (``asynchronous``). A part is slower
than a ``k``-th of the product: it reads the operand that does not travel as often as there are parts, its sides are
shorter, it is an operation of its own, and results that are put together or summed are read and written again. So small
products lose, and are left as they are.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from math import inf

from meshdsl.errors import ArgumentError, MemoryLimitError
from meshdsl.ir.graph import TracedProgram, walk
from meshdsl.ir.rings import ProductRing, chosen_rings, possible_rings
from meshdsl.ir.solution import Solution
from meshdsl.layouts.topology import Topology
from meshdsl.plan.op_times import OpTimes
from meshdsl.plan.prefetch import with_peak
from meshdsl.plan.reasons import Reasons
from meshdsl.plan.simulate import simulated_seconds
from meshdsl.util.text import bytes_text, seconds_text

_SHORTER = 1 - 1e-3  # by which factor rings have to make a simulated step shorter, beyond what a simulation can know
_HOP = "collective-permute"
Verdicts = Sequence[tuple[str, bool]]  # globs, and whether what they match is sent in rings; the last match decides


@dataclass(frozen=True)
class PricedRing:
    """A ring that a solution could have, in seconds per iteration.

    Args:
      ring: the ring.
      names: the source lines of its products, and the name of what is gathered or reduced.
      trips: iterations per step.
      replaced: of the collective and the products, one after the other.
      overlapped: of the ring.
      serial: of its hops and parts, one after the other.
    """

    ring: ProductRing
    names: tuple[str, ...]
    trips: int
    replaced: float
    overlapped: float
    serial: float

    @property
    def saved(self) -> float:
        """Seconds per step that it saves where nothing else is hidden."""
        return self.trips * (self.replaced - self.overlapped)


def priced_rings(program: TracedProgram, solution: Solution, times: OpTimes) -> list[PricedRing]:
    """Returns the rings that a solution could have, in program order.

    Args:
      times: seconds of operations under the solution, which has no rings.
    """
    possible, found = possible_rings(program.graph, solution), list[PricedRing]()
    if not possible:
        return found
    reasons, trips = Reasons(program, solution), {op.id: graph.trips for graph, op in walk(program.graph)}
    beside = _sends_beside(solution.mesh.topology)
    for ring in possible:
        whole, part = sum(map(times.compute_seconds, ring.ops)), times.ring_part_seconds(ring)
        serial = ring.hops * ring.seconds + ring.devices * part
        found.append(
            PricedRing(
                ring,
                (*(reasons.line(each.op) for each in ring.products), reasons.name(ring.value)),
                trips[ring.products[0].op.id],
                replaced=ring.step.seconds + whole,
                overlapped=ring.overlapped(part) if beside else serial,
                serial=serial,
            )
        )
    return found


def with_rings(solution: Solution, rings: Iterable[PricedRing]) -> Solution:
    """Returns a solution without rings with these; its memory is that without them."""
    rings = list(rings)
    more = sum(each.trips * (each.serial - each.replaced) for each in rings)
    chosen = sorted((each.ring.ring for each in rings), key=lambda ring: ring.products)
    return replace(solution, rings=tuple(chosen), seconds=solution.seconds + more)


def _sends_beside(topology: Topology) -> bool:
    """Whether the compiler of our programs sends permutes beside products."""
    return _HOP in topology.asynchronous and not topology.across_loops


# ---- Choice ----------------------------------------------------------------------------------------------------------


def with_best_rings(
    program: TracedProgram,
    solution: Solution,
    verdicts: Verdicts,
    simulates: bool,
    donated: frozenset[int],
    limit: float = inf,
) -> tuple[Solution, list[str]]:
    """Returns the solution with the rings that are demanded and those that pay, and notes on the former.

    The rings of the same lines and phase, such as those of all layers, are tried together, those that save most first,
    and stay if the simulated step becomes shorter.

    Args:
      solution: without rings.
      verdicts: on the rings of products on some source lines, or of some values.
      simulates: rings that nothing is said about are chosen where they pay and fit the memory.
      donated: indices of inputs whose memory the step may reuse.
      limit: of memory, in bytes per device.

    Raises:
      ArgumentError: a glob matches no ring that is possible.
      MemoryLimitError: the rings that are demanded do not fit the memory.
    """
    topology = solution.mesh.topology
    has_stages = program.pipeline is not None and bool(program.pipeline.axis)  # which compute when their tick comes
    chooses = simulates and _sends_beside(topology) and not has_stages
    if not chooses and not verdicts:
        return solution, []
    times = OpTimes(program, solution, Reasons(program, solution))
    possible = priced_rings(program, solution, times)
    _check_matches(program, verdicts, possible)
    said = [(each, _verdict(each, verdicts)) for each in possible]
    kept = disjoint_rings(each for each, verdict in said if verdict)
    notes = list(_notes(kept, topology))
    groups = defaultdict[tuple[object, ...], list[PricedRing]](list)
    for each, verdict in said:
        if chooses and verdict is None and each.saved > 0:
            phases = {part.op.phase for part in each.ring.products}
            groups[each.ring.step.kind, each.ring.axis, each.names[:-1], *phases].append(each)
    best = with_peak(program, with_rings(solution, kept), donated) if kept else solution
    if kept and best.peak > limit:
        need = f"{bytes_text(best.peak)} per device, {bytes_text(solution.peak)} without; {bytes_text(limit)} allowed"
        raise MemoryLimitError(f"overlap: the rings do not fit: {need}\ndemand fewer rings, or raise memory=")
    least = simulated_seconds(program, best, times) if groups else 0.0
    for group in sorted(groups.values(), key=lambda group: -sum(each.saved for each in group)):
        more = disjoint_rings(group, kept)
        if len(more) == len(kept):
            continue
        trial = with_rings(solution, more)
        seconds = simulated_seconds(program, trial, times)
        if seconds < least * _SHORTER and (trial := with_peak(program, trial, donated)).peak <= limit:
            best, least, kept = trial, seconds, more
    return best, notes


def disjoint_rings(more: Iterable[PricedRing], kept: Sequence[PricedRing] = ()) -> list[PricedRing]:
    """Returns rings with more of them, those that save most, without those that exclude one before."""
    found = list(kept)
    for each in sorted(more, key=lambda each: -each.saved):
        if not any(each.ring.excludes(other.ring) for other in found):
            found.append(each)
    return found


def _verdict(each: PricedRing, verdicts: Verdicts) -> bool | None:
    """What is said about a ring; None if nothing is."""
    found = [verdict for glob, verdict in verdicts if any(fnmatchcase(name, glob) for name in each.names)]
    return found[-1] if found else None


def _check_matches(program: TracedProgram, verdicts: Verdicts, possible: Sequence[PricedRing]) -> None:
    known = dict.fromkeys(name for each in possible for name in each.names)
    for glob, _ in verdicts:
        if glob != "*" and not any(fnmatchcase(name, glob) for name in known):
            raise ArgumentError(
                f"overlap: no ring is possible at {glob!r} in {program.name}; its rings are of products at, or of: "
                f"{', '.join(known) or 'none'}"
            )


def _notes(forced: Sequence[PricedRing], topology: Topology) -> Iterator[str]:
    """What demanded rings cost, and what a compiler does that cannot do what is demanded."""
    if forced and not _sends_beside(topology):
        yield f"rings hide nothing on {topology.name}: its compiler computes nothing while a block is passed on"
    for each in forced:
        if each.saved <= 0:
            *lines, name = each.names
            ring = f"the ring demanded for the {each.ring.step.kind} of {name} ({', '.join(dict.fromkeys(lines))})"
            takes = (
                f"takes {seconds_text(each.trips * each.overlapped)} per step, {seconds_text(-each.saved)} more than"
            )
            yield f"{ring} {takes} sending and computing one after the other"


# ---- Faults ----------------------------------------------------------------------------------------------------------


def ring_faults(program: TracedProgram, solution: Solution) -> Iterator[str]:
    """Yields a text per ring that is not possible, or has a product that another one has."""
    possible = {ring.ring: ring for ring in chosen_rings(program.graph, solution)}
    for i, ring in enumerate(solution.rings):
        if ring not in possible:
            yield f"rings[{i}]: products {', '.join(map(str, ring.products))} do not run beside a ring of {ring.value}"
            continue
        others = (possible[other] for other in solution.rings[:i] if other in possible)
        if any(possible[ring].excludes(other) for other in others):
            yield f"rings[{i}]: a product or a copy of it is in an earlier ring, too"
