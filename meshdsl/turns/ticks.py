"""The ticks of a table as loops.

Ticks with the same kinds of work, one after the other, are one scan; runs of such ticks that come again are a scan over
scans. So a program is as long as there are ways to spend a tick, however many microbatches there are. Where there are
many, heads are run in every backward, and then everything in every tick: what is not asked for is masked.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

BODIES = 8


@dataclass(frozen=True)
class Ticks:
    """``count`` ticks in which work of the same kinds is done (``Table.kinds``)."""

    kinds: str
    count: int


@dataclass(frozen=True)
class Loop:
    """Ticks that come several times, from ``start`` on."""

    start: int
    times: int
    parts: tuple[Ticks, ...]

    @property
    def every(self) -> int:
        """Ticks from one time to the next."""
        return sum(part.count for part in self.parts)


def make_loops(kinds: Sequence[str], bodies: int = BODIES) -> list[Loop]:
    """Loops over ticks of these kinds, with no more parts than ``bodies`` if more may be done than is asked for."""
    every = "".join(sorted(set("".join(kinds))))
    for more in (kinds, [_with_head(k) for k in kinds], [every] * len(kinds)):
        loops = list(_loops([Ticks(kind, len(list(same))) for kind, same in groupby(more)]))
        if sum(len(loop.parts) for loop in loops) <= bodies:
            break
    return [_alone(kinds[loop.start], loop) for loop in loops]


def _alone(kind: str, loop: Loop) -> Loop:
    """A loop of one tick does what is asked for: compilers see that there is no more to it."""
    return replace(loop, parts=(Ticks(kind, 1),)) if loop.times * loop.every == 1 else loop


def _with_head(kinds: str) -> str:
    return kinds + "H" if ("B" in kinds or "I" in kinds) and "H" not in kinds else kinds


def _loops(runs: Sequence[Ticks]) -> Iterator[Loop]:
    start = at = 0
    while at < len(runs):
        length, times = max(((n, _times(runs[at:], n)) for n in range(1, len(runs) - at + 1)), key=_saved)
        loop = Loop(start, times, tuple(runs[at : at + length])) if times > 1 else Loop(start, 1, (runs[at],))
        yield loop
        at, start = at + loop.times * len(loop.parts), start + loop.times * loop.every


def _times(runs: Sequence[Ticks], n: int) -> int:
    """How often the first runs come, one time after the other."""
    times = 1
    while runs[times * n : (times + 1) * n] == runs[:n]:
        times += 1
    return times


def _saved(found: tuple[int, int]) -> tuple[int, int]:
    length, times = found
    return length * (times - 1), -length
