"""Grouping arrays for print: repeated layers and parallel subtrees share a row.

Paths become patterns by writing ``*`` for numbers; then patterns that differ in one component
only, as ``mu`` and ``nu`` of an optimizer do, are written together as ``{mu,nu}``. A number that
is the same in the whole row is shown: what stands for one array is its path.
"""

import re
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, replace

from meshdsl.globs import Parts, split_path
from meshdsl.plan.value import Array

_NUMBER = re.compile(r"(?<=/)\d+(?=/|\b)")
_SHOWN = 4


@dataclass(frozen=True)
class Group:
    """Arrays that agree in type, layout and pins.

    Args:
      array: the first of them.
      parts: per component of their patterns, the texts it takes.
      paths: of all of them, in components.
    """

    array: Array
    parts: tuple[Parts, ...]
    paths: tuple[Parts, ...]

    @property
    def count(self) -> int:
        """How many they are."""
        return len(self.paths)

    @property
    def name(self) -> str:
        """The path of all of them: numbers that differ as ``*``, alternatives in braces."""
        taken = (tuple(dict.fromkeys(column)) for column in zip(*self.paths, strict=True))
        shown = (
            part if part != ("*",) or len(texts) > 1 else texts for part, texts in zip(self.parts, taken, strict=True)
        )
        return "/".join(map(_alternatives, shown)) or "(the result)"


def group_arrays(arrays: Iterable[Array]) -> list[Group]:
    """The arrays in rows, in the order in which rows begin."""
    rows: dict[tuple[object, ...], Group] = {}
    for array in arrays:
        parts = tuple((part,) for part in split_path(pattern(array.path)))
        key = (*_likeness(array), parts)
        seen = rows.get(key)
        path = split_path(array.path)
        rows[key] = replace(seen, paths=(*seen.paths, path)) if seen else Group(array, parts, (path,))
    return _joined(list(rows.values()))


def pattern(text: str) -> str:
    """The text with ``*`` for every number that is a component of a path."""
    return _NUMBER.sub("*", text)


def common(texts: Iterable[str]) -> str:
    """The text itself if all are the same, else their pattern; they have to agree in that."""
    first, *rest = dict.fromkeys(texts)
    return pattern(first) if rest else first


def _joined(groups: list[Group]) -> list[Group]:
    """The groups with those in one that agree in all but one component, until none do."""
    done: list[Group] = []
    shared: list[list[Hashable]] = []  # per row, what it has in common with those that it can take in
    places: dict[Hashable, dict[int, None]] = {}
    for group in groups:
        own = _all_but_one(group)
        fitting = [(at, i) for i, key in enumerate(own) for at in places.get(key, ()) if shared[at][i] == key]
        if fitting:
            into, i = min(fitting)
            done[into] = _join(done[into], group, i + 1)
            shared[into] = _all_but_one(done[into])
        else:
            into = len(done)
            done.append(group)
            shared.append(own)
        for key in shared[into]:
            places.setdefault(key, {})[into] = None
    return done if len(done) == len(groups) else _joined(done)


def _all_but_one(group: Group) -> list[Hashable]:
    """For every component but the first, all that a like group that differs in it only has too."""
    like = _likeness(group.array)
    return [(like, i, group.parts[:i], group.parts[i + 1 :]) for i in range(1, len(group.parts))]


def _join(a: Group, b: Group, at: int) -> Group:
    both = tuple(dict.fromkeys((*a.parts[at], *b.parts[at])))
    return Group(a.array, (*a.parts[:at], both, *a.parts[at + 1 :]), a.paths + b.paths)


def _likeness(array: Array) -> tuple[object, ...]:
    return array.type, array.layout, array.pinned


def _alternatives(part: Parts) -> str:
    if len(part) == 1:
        return part[0]
    more = [f"+{len(part) - _SHOWN}"] if len(part) > _SHOWN else []
    return "{" + ",".join([*part[:_SHOWN], *more]) + "}"
