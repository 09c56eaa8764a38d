"""``overlap=``: whether communication is hidden; which loops are pipelined, and which products run in rings."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from meshdsl.errors import ArgumentError, faults, is_a, likely

MODES = ("off", "prefetch", "full")
_WORDS = ", ".join(map(repr, MODES))


def _listed(globs: Any) -> tuple[Any, ...] | None:
    """One glob or several as a tuple; None as it is."""
    if globs is None or isinstance(globs, tuple):
        return globs
    return tuple(globs) if isinstance(globs, Iterable) and not isinstance(globs, str) else (globs,)


def _verdicts(rings: Any) -> tuple[tuple[Any, Any], ...]:
    """Globs with what is said of rings there, in order; globs alone refuse all other rings."""
    if rings is None or isinstance(rings, Mapping):
        return tuple(rings.items()) if rings else ()
    listed = _listed(rings) or ()
    if listed and all(isinstance(one, tuple) and len(one) == len(("glob", True)) for one in listed):
        return tuple(listed)
    return (("*", False), *((glob, True) for glob in listed))


@dataclass(frozen=True)
class Overlap:
    """What a plan does so that communication is hidden behind computation; see ``meshdsl.parallelize``.

    Args:
      mode: ``"off"``: layouts are chosen by ``plan.seconds``, where operations run one after the other, and loops send
        where they need it. ``"prefetch"``: the same layouts, but loops over layers send collectives one iteration ahead
        or behind where that pays. ``"full"``: that, layouts are chosen by ``plan.simulated_seconds``, and products run
        in parts beside the hops of a ring where that pays.
      loops: globs over the source lines of loops, ``"model.py:12"`` or ``"*"``: these loops send ahead and behind all
        they can, whether it pays or not, and no others do. Empty: no loop does. Default: the planner chooses, and only
        for devices that can send and compute at once.
      rings: globs over the source lines of products, or over names of the arrays that are gathered for them or that
        they are reduced to, such as ``"params/*w1"`` (a star also stands for slashes): these products run in parts
        beside the hops of a ring, whether that pays or not, and no others do. A mapping from globs to true and false
        demands some and refuses others, the last match decides, and of the rest the planner chooses. Empty: no
        product does. Default: the planner chooses where ``mode`` is ``"full"``, and only for devices that can send
        and compute at once.

    Raises:
      ArgumentError: lists all arguments that are not of these kinds.

    Example:
      >>> overlap = md.Overlap("prefetch", loops="*")
      >>> plan = md.parallelize(step, "data=8", md.fsdp(), overlap=overlap).plan(params, batch)
      >>> overlap.loops, len(plan.prefetched)
      (('*',), 0)
    """

    mode: str = "full"
    loops: str | Iterable[str] | None = None
    rings: str | Iterable[str] | Mapping[str, bool] | None = None

    def __post_init__(self) -> None:
        """Check the arguments; loops are a tuple of globs afterwards, and rings one of pairs."""
        rows = []
        if self.mode not in MODES:
            rows.append(f"mode: {self.mode!r} is none of {_WORDS}{likely(self.mode, MODES)}")
        loops, rings = _listed(self.loops), _verdicts(self.rings)
        for name, globs in (("loops", loops or ()), ("rings", [glob for glob, _ in rings])):
            wrong = (glob for glob in globs if not isinstance(glob, str))
            rows += [f"{name}: {is_a(glob)}, not a glob over source lines such as 'model.py:12'" for glob in wrong]
        rows += [
            f"rings: {verdict!r} for {glob!r} is neither True nor False"
            for glob, verdict in rings
            if not isinstance(verdict, bool)
        ]
        if loops and self.mode == "off":
            rows.append("loops: mode 'off' prefetches in no loop; write mode 'prefetch', or leave one of them out")
        if any(verdict for _, verdict in rings) and self.mode == "off":
            rows.append("rings: mode 'off' has no rings; write mode 'prefetch', or leave one of them out")
        if rows:
            raise ArgumentError(faults("invalid arguments of Overlap:", rows))
        object.__setattr__(self, "loops", loops)
        object.__setattr__(self, "rings", None if self.rings is None else rings)

    def __bool__(self) -> bool:
        """Whether anything is hidden."""
        return self.mode != "off"

    @property
    def simulates(self) -> bool:
        """Whether layouts are chosen by simulated time."""
        return self.mode == "full"

    @property
    def globs(self) -> tuple[str, ...] | None:
        """The globs over lines of loops; None if the planner chooses."""
        return () if self.mode == "off" else None if self.loops is None else tuple(self.loops)

    @property
    def verdicts(self) -> tuple[tuple[str, bool], ...]:
        """Globs over lines of products and names of arrays, and whether rings are demanded or refused there."""
        return _verdicts(self.rings) if self else ()


OFF = Overlap("off")


def parse_overlap(overlap: object, rows: list[str]) -> Overlap:
    """Return the option that a bool, a word or an ``Overlap`` stands for; append a fault if it is none of these."""
    if isinstance(overlap, Overlap):
        return overlap
    if isinstance(overlap, bool):
        return Overlap("full") if overlap else OFF
    if isinstance(overlap, str) and overlap in MODES:
        return Overlap(overlap)
    rows.append(f"overlap: {overlap!r} is none of {_WORDS}, True, False and md.Overlap(...){likely(overlap, MODES)}")
    return OFF
