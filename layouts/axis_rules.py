"""Layout rules: which mesh axes split which named dim, for a whole model at once.

    Rules.parse("batch:data hidden:model heads:model vocab:model")     data and tensor parallel
    Rules("batch:data", params="embed:data", optimizer="embed:data")   FSDP
    Rules("batch:data", optimizer="embed:data")                        ZeRO-1

A rule pins a dim of the arrays at the step's boundary wherever the dim occurs; all that no rule
speaks of is planned. Several axes are written major first, ``batch:(data,fsdp)``. Beside the
table for all arrays there may be one for each kind of them, whose rules come first:

    params       inputs that the step replaces and that its forward or backward pass reads
    optimizer    inputs that the step replaces and that only the update reads
    activations  inputs that the step does not replace (the batch), results that replace nothing, and, if this
                 table is given, the named tensors that are computed inside the step

(A rule of an *operation*, ``md.rule``, is another thing.)
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from meshdsl.errors import NotationError, is_a
from meshdsl.layouts.layout import Layout
from meshdsl.layouts.notation import parse_rules
from meshdsl.layouts.placement import Split

GROUPS = ("params", "optimizer", "activations")
Table = Mapping[str, tuple[str, ...]]


@dataclass(frozen=True, repr=False)
class Rules:
    """Mesh axes by dim, for all arrays and for kinds of them.

    Args:
      table: for all arrays at the boundary.
      params: rules for parameters that come before those of ``table``.
      optimizer: the same for optimizer state.
      activations: the same for batch and results; they also pin what is computed inside the step.

    Raises NotationError, with a caret, for text that is no table.
    """

    table: str = ""
    params: str | None = None
    optimizer: str | None = None
    activations: str | None = None

    def __post_init__(self) -> None:
        """Keep the tables as they are read back."""
        for name, table in self.tables.items():
            object.__setattr__(self, name, _written(table))

    @classmethod
    def parse(cls, text: str) -> "Rules":
        """One table for all arrays: ``"batch:data hidden:model"``."""
        return cls(text)

    @classmethod
    def of(cls, stated: "Rules | str") -> "Rules":
        """Rules, or those that a text writes; NotationError for anything else."""
        if not isinstance(stated, Rules | str):
            raise NotationError(f"{is_a(stated)}, no layout rules; write text such as 'batch:data hidden:model'")
        return stated if isinstance(stated, Rules) else cls.parse(stated)

    def group(self, name: str) -> Table:
        """The rules for one kind of arrays, those of all arrays included."""
        return {**self.tables["table"], **self.tables.get(name, {})}

    @property
    def inside(self) -> Table | None:
        """The rules for what is computed inside the step; None if nothing is said of it."""
        return self.group("activations") if self.activations is not None else None

    @property
    def tables(self) -> Mapping[str, Table]:
        """Every table that is given, by the name of its argument."""
        given = {name: getattr(self, name) for name in ("table", *GROUPS)}
        return {name: parse_rules(text) for name, text in given.items() if text is not None}

    def __repr__(self) -> str:
        given = [repr(self.table)] if self.table else []
        given += [f"{name}={text!r}" for name in GROUPS if (text := getattr(self, name)) is not None]
        return f"Rules({', '.join(given)})"

    def __str__(self) -> str:
        given = [self.table] if self.table else []
        return " ".join(given + [f"{name}[{text}]" for name in GROUPS if (text := getattr(self, name)) is not None])


def layout_of(dims: Sequence[str], table: Table) -> Layout:
    """The pin of a tensor with these dims, by position."""
    return Layout(**{axis: Split(i) for i, name in enumerate(dims) for axis in table.get(name, ())})


def conflicts(dims: Sequence[str], table: Table) -> list[str]:
    """A row for every two rules by which an axis would split two dims of one tensor."""
    found: dict[str, list[str]] = {}
    for name in dims:
        for axis in table.get(name, ()):
            found.setdefault(axis, []).append(entry(name, table[name]))
    pairs = dict.fromkeys(pair for rules in found.values() for pair in combinations(rules, 2))
    return [f"{_contradict(*pair)}; an axis splits one dim of a tensor" for pair in pairs]


def _contradict(rule: str, other: str) -> str:
    return f"{rule} speaks of two dims" if rule == other else f"{rule} and {other} contradict"


def entry(dim: str, axes: Sequence[str]) -> str:
    """One rule, as it is written: ``batch:data``, ``batch:(data,fsdp)``."""
    return f"{dim}:{_several(axes)}"


def _written(table: Table) -> str:
    return " ".join(entry(name, axes) for name, axes in table.items())


def _several(axes: Sequence[str]) -> str:
    return axes[0] if len(axes) == 1 else f"({','.join(axes)})"
