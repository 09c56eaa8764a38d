"""What a plan file holds, field by field.

Layouts and rows of rules are written once, in tables; operations, values and uses refer to
them by position. The last field seals the others: a number that was changed by hand is no
longer what the planner predicted, and nothing else in the file could tell.
"""

from collections.abc import Iterator, Mapping
from hashlib import sha256
from typing import Any

import msgspec

from meshdsl.layouts.exchange import Exchange
from meshdsl.layouts.layout import Layout
from meshdsl.layouts.placement import Placement
from meshdsl.layouts.topology import Topology
from meshdsl.pipeline.pipelined import Pipelined
from meshdsl.plan.timing import Line, Span
from meshdsl.plan.value import Array, Collective

VERSION = 1
FORMAT = "meshdsl plan"
Seals = tuple[tuple[str, str], ...]


class Moved(msgspec.Struct, array_like=True, frozen=True):
    """A move of one value; layouts by position."""

    value: int
    kind: str
    axes: tuple[str, ...]
    source: str
    target: str
    before: int
    after: int
    bytes: int
    seconds: float


class SignatureRecord(msgspec.Struct, array_like=True, frozen=True):
    """A row of a rule."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    size: int = 0
    collectives: tuple[Exchange, ...] = ()


class PlanFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The file.

    Args:
      ops: (op id, a signature per mesh axis).
      values: (value id, its own layout).
      uses: (op id, operand, the layout it is read in).
    """

    format: str
    version: int
    name: str
    fingerprint: str
    mesh: dict[str, int]
    topology: Topology
    seconds: float
    lower_bound: float
    simulated_seconds: float
    peak: int
    peak_op: int
    held: tuple[tuple[str, int], ...]
    held_values: tuple[tuple[int, int], ...]
    notes: tuple[str, ...]
    solver_notes: tuple[str, ...]
    operations: dict[str, int]
    inputs: tuple[Array, ...]
    outputs: tuple[Array, ...]
    collectives: tuple[Collective, ...]
    lines: tuple[Line, ...]
    spans: tuple[Span, ...]
    layouts: list[Layout]
    signatures: list[SignatureRecord]
    ops: list[tuple[int, tuple[int, ...]]]
    values: list[tuple[int, int]]
    uses: list[tuple[int, int, int]]
    moves: list[Moved]
    padded: tuple[tuple[int, int], ...]
    seals: Seals
    pipeline: Pipelined | None = None


class Head(msgspec.Struct):
    """What every version of the file begins with."""

    format: str
    version: int


def seals_of(fields: Mapping[str, Any]) -> Seals:
    """Per field, the beginning of the SHA-256 of its JSON."""
    return tuple((name, sha256(as_json(fields[name])).hexdigest()[:16]) for name in fields if name != "seals")


def broken_seals(fields: Mapping[str, Any]) -> Iterator[str]:
    """A row per field of a file that is not as it was saved."""
    sealed = dict(fields["seals"])
    for name, seal in seals_of(fields):
        if sealed.get(name) != seal:
            yield f"{name}: not as it was saved"


def as_json(value: Any) -> bytes:
    """JSON without spaces, layouts and placements as text."""
    return msgspec.json.encode(value, enc_hook=_as_text)


def _as_text(value: Any) -> str:
    """Of what JSON has no form for, only these are written as text; a number of another library would be damage."""
    if isinstance(value, Layout | Placement):
        return str(value)
    raise TypeError(f"a plan file holds no {type(value).__name__}: {value!r}")
