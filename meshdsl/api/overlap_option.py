"""``overlap=``: whether communication runs beside computation, and who says which loops are software-pipelined."""

from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches

from meshdsl.errors import ArgumentError, faults, is_a

MODES = ("off", "prefetch", "full")
_WORDS = ", ".join(map(repr, MODES))


@dataclass(frozen=True)
class Overlap:
    """What a plan does so that communication is hidden behind computation; see ``meshdsl.parallelize``.

    Args:
      mode: ``"off"``: layouts are chosen by ``plan.seconds``, where operations run one after the other, and loops send
        where they need it. ``"prefetch"``: the same layouts, but loops over layers send collectives one iteration ahead
        or behind where that pays. ``"full"``: that, and layouts are chosen by ``plan.simulated_seconds``.
      loops: globs over the source lines of loops, ``"model.py:12"`` or ``"*"``: these loops send ahead and behind all
        they can, whether it pays or not, and no others do. Empty: no loop does. Default: the planner chooses, and only
        for devices that can send and compute at once.

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

    def __post_init__(self) -> None:
        """Check the arguments; loops are a tuple of globs afterwards."""
        rows = []
        if self.mode not in MODES:
            rows.append(f"mode: {self.mode!r} is none of {_WORDS}{_nearest_word(self.mode)}")
        loops = (self.loops,) if isinstance(self.loops, str) else self.loops
        if loops is not None:
            loops = tuple(loops) if isinstance(loops, Iterable) else (loops,)
            wrong = (glob for glob in loops if not isinstance(glob, str))
            rows += [f"loops: {is_a(glob)}, not a glob over source lines such as 'model.py:12'" for glob in wrong]
            if loops and self.mode == "off":
                rows.append("loops: mode 'off' prefetches in no loop; write mode 'prefetch', or leave one of them out")
        if rows:
            raise ArgumentError(faults("invalid arguments of Overlap:", rows))
        object.__setattr__(self, "loops", loops)

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


OFF = Overlap("off")


def parse_overlap(overlap: object, rows: list[str]) -> Overlap:
    """Return the option that a bool, a word or an ``Overlap`` stands for; append a fault if it is none of these."""
    if isinstance(overlap, Overlap):
        return overlap
    if isinstance(overlap, bool):
        return Overlap("full") if overlap else OFF
    if isinstance(overlap, str) and overlap in MODES:
        return Overlap(overlap)
    rows.append(f"overlap: {overlap!r} is none of {_WORDS}, True, False and md.Overlap(...){_nearest_word(overlap)}")
    return OFF


def _nearest_word(mode: object) -> str:
    close = get_close_matches(mode, MODES, n=1) if isinstance(mode, str) else []
    return f"; did you mean {close[0]!r}?" if close else ""
