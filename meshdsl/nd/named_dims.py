"""``Dims``: names of a tensor's dims, in order, each with or without a size.

    dims ::= [ dim { (" " | ",") dim } ]
    dim  ::= name [ "=" size ]

The same notation names the dims of an array (``"batch seq embed"``), defines new tensors (``"embed=512 hidden=2048"``),
and keeps the sizes of a model in one place:

    sizes = md.dims("embed=512 heads=8 head=64")
    md.normal(key, sizes("embed heads head"))        # the sizes of these three
    sizes["embed"]                                   # 512
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from math import prod
from typing import NoReturn, TypeAlias, Union

from meshdsl.errors import MeshDSLError, NotationError, is_a, nearest
from meshdsl.nd.diagnostics import fail

_ITEM = re.compile(r"[\s,]*([^\s,=]+)(?:(=)([^\s,=]*))?")
DimsLike: TypeAlias = Union[str, "Dims", Iterable[str]]


class Dims:
    """Names in order, with or without sizes, as :func:`dims` returns them.

    Iteration yields the names, ``sizes["embed"]`` is a size, ``sizes("a b")`` are the dims of these names.

    Args:
      sizes: sizes by name; None for a dim without a size.

    Example:
      >>> sizes = md.dims("embed=512 heads=8")
      >>> sizes.names, sizes["heads"], sizes.size
      (('embed', 'heads'), 8, 4096)
    """

    __slots__ = ("_sizes",)
    _sizes: dict[str, int | None]

    def __init__(self, sizes: Mapping[str, int | None]) -> None:
        object.__setattr__(self, "_sizes", dict(sizes))

    @property
    def names(self) -> tuple[str, ...]:
        """The names, in order."""
        return tuple(self._sizes)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes, in order; DimError if a dim has none."""
        return tuple(self[name] for name in self._sizes)

    @property
    def size(self) -> int:
        """The product of all sizes; DimError if a dim has none."""
        return prod(self.sizes)

    def size_of(self, name: str) -> int | None:
        """Return the size of one dim; None if it has none."""
        return self._sizes.get(name)

    def __getitem__(self, name: str) -> int:
        if name not in self._sizes:
            raise fail(f"no dim {name!r} in [{self}]{nearest(name, self.names)}")
        size = self._sizes[name]
        if size is None:
            raise fail(f"dim {name!r} of [{self}] has no size; give one, as in {name}=128")
        return size

    def __call__(self, names: DimsLike) -> "Dims":
        """Return the dims of these names, with their sizes here."""
        wanted = read_dims(names)
        missing = [f"no dim {name!r} in [{self}]{nearest(name, self.names)}" for name in wanted if name not in self]
        if missing:
            raise fail(missing)
        return Dims({name: self._sizes[name] for name in wanted})

    def __add__(self, other: DimsLike) -> "Dims":
        more = read_dims(other)
        twice = [name for name in more if name in self]
        if twice:
            raise fail(f"duplicate dim {twice[0]!r} in [{self} {more}]")
        return Dims({**self._sizes, **more._sizes})

    def __iter__(self) -> Iterator[str]:
        return iter(self._sizes)

    def __len__(self) -> int:
        return len(self._sizes)

    def __contains__(self, name: object) -> bool:
        return name in self._sizes

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Dims) and list(self._sizes.items()) == list(other._sizes.items())

    def __hash__(self) -> int:
        return hash(tuple(self._sizes.items()))

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"Dims are immutable: cannot set {name!r}")

    def __repr__(self) -> str:
        return f"dims({str(self)!r})"

    def __str__(self) -> str:
        return " ".join(name if size is None else f"{name}={size}" for name, size in self._sizes.items())


def dims(text: DimsLike) -> Dims:
    """Return the dims of a text.

    Args:
      text: names with or without sizes, ``"batch seq embed"`` or ``"embed=512 hidden=2048"``, or an iterable of such.

    Raises:
      NotationError: the text is not one of dims; the message marks the place with a caret.

    Example:
      >>> sizes = md.dims("embed=512 heads=8 head=64")
      >>> sizes["embed"], sizes("heads head").size
      (512, 512)
    """
    return read_dims(text)


def read_dims(given: DimsLike) -> Dims:
    """Return the dims of an argument: dims, a text, or an iterable of names."""
    if isinstance(given, Dims):
        return given
    if isinstance(given, str):
        return _parse(given)
    if not isinstance(given, Iterable) or hasattr(given, "shape"):
        raise fail(f"{is_a(given)}, not dims; write text such as 'batch seq embed'", NotationError)
    return _parse(" ".join(map(str, given)))


def read_names(given: DimsLike) -> tuple[str, ...]:
    """Return the names of an argument for dims."""
    return read_dims(given).names


def _parse(text: str) -> Dims:
    found: dict[str, int | None] = {}
    at = 0
    while text[at:].strip(" \t\n,"):
        match = _ITEM.match(text, at)
        if match is None:
            raise _error(text, at + len(text[at:]) - len(text[at:].lstrip(" \t\n,")), "expected the name of a dim")
        _add(found, match, text)
        at = match.end()
    return Dims(found)


def _add(found: dict[str, int | None], match: re.Match[str], text: str) -> None:
    name, equals, size = match.groups()
    if not name.isidentifier():
        raise _error(text, match.start(1), f"{name!r} is not a valid dim name; use letters, digits and _")
    if name in found:
        raise _error(text, match.start(1), f"duplicate dim {name!r}")
    if equals and not (size.isdecimal() and int(size) >= 1):
        raise _error(text, match.start(3), "a size must be an integer >= 1, as in embed=512")
    found[name] = int(size) if equals else None


def _error(text: str, at: int, why: str) -> MeshDSLError:
    return fail([why, text, f"{' ' * at}^"], NotationError)
