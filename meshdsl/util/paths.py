"""Paths of the arrays in a tree, and globs over them: how a user names arguments and results.

A path is the argument's name and the keys below it, ``params/layers/0/w1``. A key with a slash, star, brace, quote or
space is written in quotes: ``params/'linear/~/w'/b``. In a glob

    *        matches one component; within a component any characters: layer_*
    **       matches any number of components, also none: params/**/w1 matches params/w1
    {mu,nu}  matches either, also within a component: w_{up,gate}
    'a*'     in quotes matches the key itself

So ``params/**`` matches a whole subtree, and ``params`` only an array of that name.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from difflib import get_close_matches
from functools import cache

from meshdsl.errors import nearest

Components = tuple[str, ...]
_COMPONENT = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|[^/'"]+|['"]""")
_PATHS_LISTED = 8  # of more paths, errors list the first components only
_UNQUOTED = re.compile(r"[^/*{}'\"\\\s]+")
_WILD = re.compile(r"(\*|\{[^{}]*\})")  # what stands for several texts within a component of a glob


def join_path(keys: Iterable[object]) -> str:
    """Returns the path of these keys, quoted where needed."""
    return "/".join(quote(str(key)) for key in keys)


def quote(key: str) -> str:
    """Returns the key as a component of a path."""
    if _UNQUOTED.fullmatch(key):
        return key
    return "'" + key.replace("\\", "\\\\").replace("'", "\\'") + "'"


@cache
def split_path(path: str) -> Components:
    """Returns the components of a path or glob; quotes are as :func:`quote` writes them."""
    if "'" not in path and '"' not in path:
        return tuple(path.split("/"))
    parts: list[str] = [""]
    at = 0
    while at < len(path):
        if path[at] == "/":
            parts.append("")
            at += 1
            continue
        match = _COMPONENT.match(path, at)
        assert match is not None, "every character starts a part"
        parts[-1] += _canonical(match.group())
        at = match.end()
    return tuple(parts)


def matches(glob: str, path: str) -> bool:
    """Whether the glob matches the path."""
    return _match(split_path(glob), split_path(path))


def suggest(glob: str, paths: Sequence[str]) -> str:
    """Returns a suggestion for a glob that matches none of the paths, as the end of a sentence."""
    if list(paths) == [""]:
        return "; the result is one array, named by '*'"
    for other in _near_globs(glob, paths):
        if any(matches(other, path) for path in paths):
            return f"; did you mean {other!r}?"
    close = get_close_matches(glob, paths, n=1, cutoff=0.6)
    return nearest(glob, close or dict.fromkeys(split_path(path)[0] for path in paths))


def nearest_path(path: str, paths: Sequence[str]) -> str:
    """Returns a suggestion for a path that does not exist, as the end of a sentence."""
    if list(paths) == [""]:
        return "; the result is one array, and its path is ''"
    for other in _near_globs(path, paths):
        found = next((known for known in paths if matches(other, known)), None)
        if found is not None:
            return f"; did you mean {found!r}?"
    return nearest(
        path, paths if len(paths) <= _PATHS_LISTED else dict.fromkeys(split_path(known)[0] for known in paths)
    )


def _near_globs(glob: str, paths: Sequence[str]) -> Iterator[str]:
    """Yields the glob with its subtree, and with unknown components replaced by the closest known ones."""
    yield f"{glob}/**"
    yield f"**/{glob}"
    known = dict.fromkeys(part for path in paths for part in split_path(path))
    closest = [_closest(part, known) for part in split_path(glob)]
    yield "/".join(closest)
    yield "/".join([*closest, "**"])


def _closest(part: str, known: Iterable[str]) -> str:
    if _WILD.search(part) or part in known:
        return part
    return next(iter(get_close_matches(part, known, n=1, cutoff=0.5)), part)


def _match(glob: Components, path: Components) -> bool:
    if not glob:
        return not path
    if glob[0] == "**":
        return any(_match(glob[1:], path[i:]) for i in range(len(path) + 1))
    return bool(path) and _component(glob[0], path[0]) and _match(glob[1:], path[1:])


def _component(glob: str, part: str) -> bool:
    return glob == part or _pattern(glob).fullmatch(part) is not None


@cache
def _pattern(glob: str) -> re.Pattern[str]:
    if glob.startswith("'"):
        return re.compile(re.escape(glob))
    return re.compile("".join(map(_pattern_of_part, _WILD.split(glob))))


def _pattern_of_part(part: str) -> str:
    """Returns the pattern of ``*``, of ``{mu,nu}``, whose alternatives may contain stars, or of other text."""
    if part == "*":
        return ".*"
    if not _WILD.fullmatch(part):
        return re.escape(part)
    choices = (".*".join(map(re.escape, choice.strip().split("*"))) for choice in part[1:-1].split(","))
    return f"(?:{'|'.join(choices)})"


def _canonical(text: str) -> str:
    quoted = len(text) > 1 and text[0] in "'\"" and text[-1] == text[0]
    return quote(re.sub(r"\\(.)", r"\1", text[1:-1])) if quoted else text
