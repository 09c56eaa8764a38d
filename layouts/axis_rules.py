"""Layout rules: which mesh axes split which named dim, for a whole model at once (flax's logical axis rules).

    Rules.parse("batch:data hidden:model heads:model vocab:model")     data and tensor parallel
    Rules("batch:data", params="embed:data", optimizer="embed:data")   FSDP
    Rules("batch:data", optimizer="embed:data")                        ZeRO-1

A rule pins a dim of the arrays at the step's boundary wherever the dim occurs; dims without a rule
are planned. Several axes are written major first, ``batch:(data,fsdp)``. Besides the table for all
arrays there may be one for each kind of them, whose rules take precedence:

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
    """Mesh axes by the name of a dim, for all arrays at the step's boundary and for kinds of them.

    Args:
      table: rules for all arrays, such as ``"batch:data hidden:model"``.
      params: rules for parameters, which take precedence over ``table``.
      optimizer: rules for optimizer state, likewise.
      activations: rules for batch and results, likewise; they also pin named tensors computed inside the step.
      strict: whether a rule for a dim that no array of a step has is a fault. By default it is not, so that one table
        serves many models: the plan and the log list such dims. It is one in any case if no rule applies.

    Raises:
      NotationError: with a caret, for text that cannot be read.

    Example:
      >>> fsdp = md.Rules("batch:data", params="embed:data", optimizer="embed:data")
      >>> sharded = md.parallelize(step, "data=8", rules=fsdp)
    """

    table: str = ""
    params: str | None = None
    optimizer: str | None = None
    activations: str | None = None
    strict: bool = False

    def __post_init__(self) -> None:
        """Normalize the text of the tables."""
        for name, table in self.tables.items():
            object.__setattr__(self, name, _written(table))

    @classmethod
    def parse(cls, text: str) -> "Rules":
        """Returns rules with one table for all arrays: ``"batch:data hidden:model"``."""
        return cls(text)

    @classmethod
    def of(cls, stated: "Rules | str") -> "Rules":
        """Returns rules, or those that a text describes; raises NotationError for anything else."""
        if not isinstance(stated, Rules | str):
            raise NotationError(f"{is_a(stated)}, no layout rules; write text such as 'batch:data hidden:model'")
        return stated if isinstance(stated, Rules) else cls.parse(stated)

    def group(self, name: str) -> Table:
        """Returns the rules for one kind of arrays, those of all arrays included."""
        return {**self.tables["table"], **self.tables.get(name, {})}

    @property
    def inside(self) -> Table | None:
        """The rules for named tensors computed inside the step; None if there are none."""
        return self.group("activations") if self.activations is not None else None

    @property
    def tables(self) -> Mapping[str, Table]:
        """The tables that are given, by the names of their arguments."""
        given = {name: getattr(self, name) for name in ("table", *GROUPS)}
        return {name: parse_rules(text) for name, text in given.items() if text is not None}

    def __repr__(self) -> str:
        given = [repr(self.table)] if self.table else []
        given += [f"{name}={text!r}" for name in GROUPS if (text := getattr(self, name)) is not None]
        given += ["strict=True"] if self.strict else []
        return f"Rules({', '.join(given)})"

    def __str__(self) -> str:
        given = [self.table] if self.table else []
        return " ".join(given + [f"{name}[{text}]" for name in GROUPS if (text := getattr(self, name)) is not None])


def layout_of(dims: Sequence[str], table: Table) -> Layout:
    """Returns the pin of a tensor with these dims, by position."""
    return Layout(**{axis: Split(i) for i, name in enumerate(dims) for axis in table.get(name, ())})


def conflicts(dims: Sequence[str], table: Table) -> list[str]:
    """Returns a fault for every two rules by which an axis would split two dims of one tensor."""
    found: dict[str, list[str]] = {}
    for name in dims:
        for axis in table.get(name, ()):
            found.setdefault(axis, []).append(entry(name, table[name]))
    pairs = dict.fromkeys(pair for rules in found.values() for pair in combinations(rules, 2))
    return [f"{_contradict(*pair)}; an axis splits one dim of a tensor" for pair in pairs]


def _contradict(rule: str, other: str) -> str:
    return f"{rule} applies to two dims" if rule == other else f"{rule} and {other} contradict"


def entry(dim: str, axes: Sequence[str]) -> str:
    """Returns the text of one rule: ``batch:data``, ``batch:(data,fsdp)``."""
    return f"{dim}:{_several(axes)}"


def _written(table: Table) -> str:
    return " ".join(entry(name, axes) for name, axes in table.items())


def _several(axes: Sequence[str]) -> str:
    return axes[0] if len(axes) == 1 else f"({','.join(axes)})"
