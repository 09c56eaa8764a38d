"""The audit of primitives: each of the installed jax has a rule, is traced into, or is listed with a reason.

A new version of jax brings primitives that nobody has thought about. They would be planned as operations that every
device runs on whole operands, with a note; the audit fails instead, until somebody gives them a rule, or writes into
``primitives.toml`` why there is none and what that costs. The list is also the page ``docs/evidence/primitives.md``.

    python -m tests.coverage.audit     writes the page, and prints what is not accounted for
"""

import sys
import tomllib
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from importlib import import_module
from pathlib import Path
from pkgutil import walk_packages
from typing import Any

import jax
from jax.extend.core import Primitive

from bench.report import summarised
from meshdsl.rules import RULES
from meshdsl.rules.registry import ONCE
from meshdsl.trace.passes.canonicalize import ALWAYS_IDENTITIES
from meshdsl.trace.read_jaxpr import READERS

LIST = Path(__file__).with_name("primitives.toml")
PAGE = Path("docs/evidence/primitives.md")
SHORT = (
    "The primitives of jax that run whole on every device, in groups, with the reason and what that costs.",
    "All others have a sharding rule, or are read as the operations that they consist of.",
)
INTRO = """# Primitives without a rule

Every primitive of jax 0.10 and 0.12 either has a sharding rule ([coverage](coverage.md) says how far it goes), or is
read as the operations that it consists of, or is listed here. A primitive that is none of these, one of your own or of
another library, is planned like a call out of jax, and a note of the printed plan names it.
"""


@dataclass(frozen=True)
class Found:
    """A primitive, and the module that it is from."""

    primitive: Any
    module: str

    @property
    def name(self) -> str:
        """The name by which traces show it."""
        return str(self.primitive.name)


@dataclass(frozen=True)
class Group:
    """Primitives without a rule for one reason.

    Args:
      names: those of the installed jax. modules: patterns of modules, all of whose primitives belong here.
    """

    title: str
    names: tuple[str, ...]
    modules: tuple[str, ...]
    reason: str
    cost: str
    others: tuple[str, ...] = ()

    def holds(self, found: Found) -> bool:
        """Whether a primitive is of this group."""
        return found.name in self.names or any(fnmatchcase(found.module, pattern) for pattern in self.modules)


@cache
def installed() -> tuple[Found, ...]:
    """Every primitive of the installed jax: whatever its modules define, once all public ones are imported."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in _public_modules():
            try:
                import_module(name)
            except Exception:  # of a module that needs a package which is not installed
                continue
    found: dict[int, Found] = {}
    for name, module in sorted(sys.modules.items(), key=lambda item: (item[0].count("."), item[0])):
        if name.partition(".")[0] == "jax":
            for value in list(vars(module).values()):
                if isinstance(value, Primitive):
                    found.setdefault(id(value), Found(value, name))
    return tuple(sorted(found.values(), key=lambda each: (each.module, each.name)))


def _public_modules() -> Iterator[str]:
    hidden = ("._src", "__main__", ".tools", "jax2tf", "collect_profile")
    for module in walk_packages(jax.__path__, "jax.", onerror=lambda name: None):
        if not any(part in module.name for part in hidden):
            yield module.name


@cache
def groups() -> tuple[Group, ...]:
    """The list, of which ``names`` are those that the installed jax should have."""
    ours, theirs = ("older", "newer") if jax.__version_info__ < (0, 11) else ("newer", "older")
    return tuple(
        Group(
            each["title"],
            tuple(f"{each.get('names', '')} {each.get(ours, '')}".split()),
            tuple(each.get("modules", ())),
            each["reason"],
            each["cost"],
            tuple(each.get(theirs, "").split()),
        )
        for each in tomllib.loads(LIST.read_text())["group"]
    )


def treatment(found: Found) -> str:
    """What becomes of a primitive: ``rule``, ``read``, ``traced into``, the title of its group, or nothing."""
    known = _known(found.name)
    if known:
        return known
    group = next((group for group in groups() if group.holds(found)), None)
    if group is not None:
        return group.title
    return "traced into" if found.name in traced() else ""


def _known(name: str) -> str:
    if name in RULES or name in ONCE:
        return "rule"
    return "read" if name in READERS or name in ALWAYS_IDENTITIES else ""


@cache
def traced() -> tuple[str, ...]:
    """The names of primitives that are read as the operations of their implementation."""
    return tuple(tomllib.loads(LIST.read_text())["traced"]["names"].split())


def unaccounted() -> list[str]:
    """The primitives that have no rule, are not traced into, and are not listed."""
    return [f"{found.module}: {found.name}" for found in installed() if not treatment(found)]


def stale() -> list[str]:
    """Names of the list that the installed jax does not have."""
    known = {found.name for found in installed()}
    return [name for name in (*traced(), *(name for group in groups() for name in group.names)) if name not in known]


def needless() -> list[str]:
    """Names of the list that have a rule, or are read."""
    return [name for name in (*traced(), *(name for group in groups() for name in group.names)) if _known(name)]


def page() -> str:
    """The list as a page, the same for every version of jax."""
    read = f"Read as the operations that they consist of: {_listed(traced())}.\n"
    return summarised("\n".join([INTRO, read, *map(_section, groups())]), *SHORT)


def _section(group: Group) -> str:
    what = _listed((*group.names, *group.others)) or "all of Pallas, Mosaic and Thunky"
    return f"## {group.title}\n\n{group.reason}\n\n*Cost.* {group.cost}\n\n{what}\n"


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(set(names)))


if __name__ == "__main__":
    PAGE.write_text(page())
    print("\n".join(unaccounted()) or f"all of {len(installed())} primitives are accounted for")
