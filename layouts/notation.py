"""The text of meshes, placements and layouts, read with errors that point at the fault.

mesh      ::= axis "=" size { ("," | " ") axis "=" size }
layout    ::= [ axis "=" placement { (" " | ",") axis "=" placement } ] [ "@" ( "host" | "device" ) ]
placement ::= "B" | "S" "(" dim ")" | "P" [ "(" ("sum" | "max" | "min") ")" ]
dim       ::= number | name
rules     ::= [ name ":" axes { (" " | ",") name ":" axes } ]
axes      ::= axis | "(" axis { "," axis } ")"
"""

import re
from collections.abc import Callable, Iterator
from typing import TypeVar

from meshdsl.errors import NotationError, is_a, nearest
from meshdsl.layouts.placement import REDUCTIONS, B, P, Partial, Placement, Split

T = TypeVar("T")
_ITEM = re.compile(r"[\s,]*([^\s,=]*)\s*(=?)\s*([A-Za-z0-9_]*\s*(?:\([^)]*\)?)?)")
_NAME = re.compile(r"[A-Za-z_]\w*")
_RULE = re.compile(r"[\s,]*([A-Za-z_]\w*)\s*:\s*([A-Za-z_]\w*|\(\s*[A-Za-z_]\w*(?:[\s,]+[A-Za-z_]\w*)*\s*\))")
_NUMBER = re.compile(r"[0-9]+")
_MEMORY = re.compile(r"@(\w*)(?![^\s,])")
MEMORIES = ("host", "device")


def parse_mesh(text: str) -> dict[str, int]:
    """Axis sizes of ``"data=4,model=2"``, in order."""
    return _pairs(text, "mesh", "data=4,model=2", _size)


def parse_layout(text: str) -> tuple[dict[str, Placement], str]:
    """Placements of ``"data=S(0) model=P @host"``, in order, and the memory; empty if none is named."""
    named = list(_MEMORY.finditer(text)) if isinstance(text, str) else []
    for i, match in enumerate(named):
        if match.group(1) not in MEMORIES:
            near = nearest(match.group(1), MEMORIES)
            raise _error(text, match.start(), f"no memory {match.group()!r}{near}; write @host or @device")
        if i:
            raise _error(text, match.start(), "a second memory is named; a value lives in one")
    rest = _MEMORY.sub(lambda match: " " * len(match.group()), text) if named else text
    return _pairs(rest, "layout", "data=S(0) model=P", _placement), named[0].group(1) if named else ""


def parse_rules(text: str) -> dict[str, tuple[str, ...]]:
    """Mesh axes by dim of ``"batch:(data,fsdp) hidden:model"``, major first."""
    if not isinstance(text, str):
        raise NotationError(f"{is_a(text)}, not the text of layout rules, such as 'batch:data hidden:model'")
    found: dict[str, tuple[str, ...]] = {}
    at = 0
    while text[at:].strip(" \t\n,"):
        match = _RULE.match(text, at)
        if match is None:
            start = len(text) - len(text[at:].lstrip(" \t\n,"))
            raise _error(text, start, "dim:axis was expected, as in 'batch:data' or 'batch:(data,fsdp)'")
        name, axes = match.group(1), tuple(re.split(r"[\s,]+", match.group(2).strip("() \t")))
        if name in found:
            raise _error(text, match.start(1), f"two rules split dim {name!r}; {_both(name, found[name], axes)}")
        if len(set(axes)) < len(axes):
            raise _error(text, match.start(2), f"an axis splits dim {name!r} twice")
        found[name], at = axes, match.end()
    return found


def _both(name: str, first: tuple[str, ...], second: tuple[str, ...]) -> str:
    both = ",".join(dict.fromkeys((*first, *second)))
    return f"over several axes, major first, it is {name}:({both})" if "," in both else "once is enough"


def parse_placement(text: str) -> Placement:
    """The placement ``"S(0)"``, ``"B"``, ``"P"`` or ``"P(max)"``."""
    return _placement(text.strip(), text, 0)


def _pairs(text: str, what: str, example: str, read: Callable[[str, str, int], T]) -> dict[str, T]:
    if not isinstance(text, str):
        raise NotationError(f"{is_a(text)}, not the text of a {what}, such as {example!r}")
    found: dict[str, T] = {}
    for match in _items(text):
        name, equals, value = match.group(1), match.group(2), match.group(3).strip()
        if not _NAME.fullmatch(name):
            raise _error(text, match.start(1), f"an axis name was expected in this {what}, as in {example!r}")
        if not equals:
            raise _error(text, match.end(1), f"'=' was expected after axis {name!r}, as in {example!r}")
        if name in found:
            raise _error(text, match.start(1), f"axis {name!r} is named twice")
        found[name] = read(value, text, match.start(3))
    return found


def _items(text: str) -> Iterator[re.Match[str]]:
    at = 0
    while text[at:].strip(" \t\n,"):
        match = _ITEM.match(text, at)
        assert match is not None, "every part of the pattern may be empty"
        yield match
        if match.end() == at:
            raise _error(text, at, "nothing readable here")
        at = match.end()


def _size(value: str, text: str, at: int) -> int:
    if not _NUMBER.fullmatch(value) or int(value) < 1:
        raise _error(text, at, "a size is a whole number >= 1")
    return int(value)


def _placement(value: str, text: str, at: int) -> Placement:
    kind, _, rest = value.partition("(")
    kind, inner = kind.strip(), rest.rstrip(") ").strip()
    if "(" in value and not value.endswith(")"):
        raise _error(text, at + len(value), "')' was expected")
    if kind == "B" and "(" not in value:
        return B
    if kind == "P":
        return _partial(inner, text, at) if "(" in value else P
    if kind == "S" and _NUMBER.fullmatch(inner):
        return Split(int(inner))
    if kind == "S" and _NAME.fullmatch(inner):
        return Split(inner)
    if kind == "S":
        raise _error(text, at, "S needs the dim it splits, as in S(0) or S(batch)")
    raise _error(text, at, f"a placement is S(dim), B, P, P(max) or P(min), not {value!r}")


def _partial(reduction: str, text: str, at: int) -> Placement:
    reduction = reduction.strip("\"'")
    if reduction not in REDUCTIONS:
        raise _error(text, at + 2, f"no reduction {reduction!r}{nearest(reduction, REDUCTIONS)}")
    return Partial(reduction)


def _error(text: str, at: int, why: str) -> NotationError:
    return NotationError(f"{why}\n  {text}\n  {' ' * at}^")
