"""What a compiled program executes: instructions where they stand, and how often.

A loop's body runs as often as the loop's trip count says, everything else once; loops of unknown
length count once, and what is inside says so.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache

from meshdsl.lowering.hlo_text import Instruction, Module, called, trip_count


@dataclass(frozen=True)
class Site:
    """An instruction where it stands.

    Args:
      inside: the computation around it.
      trips: executions per run of the program.
      known: every enclosing loop has a known trip count.
    """

    instruction: Instruction
    inside: str
    trips: int = 1
    known: bool = True


def executed(module: Module, wanted: Callable[[Instruction], bool]) -> tuple[Site, ...]:
    """Every wanted instruction that is reached from the entry; a TPU's chain of fusions counts once."""

    @cache
    def within(name: str) -> tuple[Site, ...]:
        lines = module.computations.get(name, ())
        starts = any("AsyncCollectiveStart" in line.rest for line in lines)
        return tuple(site for line in lines if starts or "chain_id=" not in line.rest for site in of(line, name))

    def of(line: Instruction, inside: str) -> Iterator[Site]:
        if wanted(line):
            yield Site(line, inside)
            return
        trips = trip_count(line, module) if line.opcode == "while" else 1
        for name in called(line):
            for site in within(name):
                yield replace(site, trips=site.trips * (trips or 1), known=site.known and trips is not None)

    return within(module.entry)
