"""What has been judged, counted."""

from collections import Counter
from dataclasses import dataclass, field

from tests.fuzz.generator import Batch


@dataclass
class Tally:
    """Cases that passed.

    Args:
      compared: those of which all plans were looked at.
      kinds: how many cases have a block of that name, run on that mesh, and so on.
      above: texts of cases whose plan is not the cheapest.
    """

    cases: int = 0
    compared: int = 0
    kinds: Counter[tuple[str, str]] = field(default_factory=Counter)
    above: list[str] = field(default_factory=list)

    def add(self, other: "Tally") -> None:
        """Count what another tally has counted as well."""
        self.cases += other.cases
        self.compared += other.compared
        self.kinds += other.kinds
        self.above += other.above

    def __str__(self) -> str:
        return f"{self.cases} cases passed; {self.compared} compared with all plans, {len(self.above)} not the cheapest"

    def table(self) -> str:
        """A line per kind, the most frequent first."""
        rows = sorted(self.kinds.items(), key=lambda row: (row[0][0], -row[1], row[0][1]))
        return "\n".join(f"{what:8} {name:24} {count:6}" for (what, name), count in rows)


def kinds(batch: Batch) -> Counter[tuple[str, str]]:
    """What the cases of a batch are made of, each case counted once."""
    plan = "the planner's" if batch.seed is None else "at random"
    shared = [("mesh", ",".join(map(str, batch.mesh.sizes))), ("plan", plan)]
    found: Counter[tuple[str, str]] = Counter()
    for case in batch.cases:
        found.update([*shared, *(("block", name) for name in set(case.blocks))])
    return found
