"""Text on a terminal: as wide as it is, kinds of collectives in the colours of the report; plain text elsewhere."""

import logging
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from rich.console import Console
from rich.highlighter import Highlighter
from rich.text import Text

from meshdsl.util.text import terminal_width, visible, wrapped

_KIND_COLORS = {  # those of the report
    "all-gather": "#5b9bdf",
    "reduce-scatter": "#3bb08d",
    "all-reduce": "#e0853f",
    "all-to-all": "#b07fd4",
    "collective-permute": "#c4ad3a",
}


class _KindHighlighter(Highlighter):
    """Colours the kinds of collectives, wherever they are named."""

    def highlight(self, text: Text) -> None:
        """Colours the text in place."""
        for kind, color in _KIND_COLORS.items():
            text.highlight_words([kind], color)


def terminal(**options: Any) -> Console:
    """Returns a console that colours kinds of collectives and breaks no lines.

    Args:
      **options: of rich's ``Console``.
    """
    return Console(highlighter=_KindHighlighter(), soft_wrap=True, **options)


def print_fitted(console: Console, text: Callable[[], str]) -> None:
    """Prints a text with its tables; on a terminal they are as wide as the terminal.

    Args:
      text: makes the text, as wide as it is to be.
    """
    with terminal_width(console.width) if console.is_terminal else nullcontext():
        console.print(visible(wrapped(text()), allowed="\n"), markup=False)


class Work(logging.Handler):
    """A line on a terminal that says what is being done, and how far the planner is; a context manager.

    Args:
      console: where the line stands, as long as it is entered.
      text: what is being done.
    """

    _LEVELS = {"meshdsl.compile": logging.INFO, "meshdsl.progress": logging.DEBUG}  # loggers that are listened to

    def __init__(self, console: Console, text: str) -> None:
        super().__init__()
        self._text, self._status = text, console.status(text)
        self._before: dict[str, tuple[int, bool]] = {}

    def update(self, text: str) -> None:
        """Says that something else is being done."""
        self._text = text
        self._status.update(text)

    def emit(self, record: logging.LogRecord) -> None:
        """Adds to the line why the work takes longer, or how far it is."""
        compiles = record.name == "meshdsl.compile"
        note = "the first plan on this machine compiles the planner's loops" if compiles else record.getMessage()
        self._status.update(f"{self._text} ({note})")

    def __enter__(self) -> "Work":
        for name, level in self._LEVELS.items():
            logger = logging.getLogger(name)
            self._before[name] = logger.level, logger.propagate
            logger.addHandler(self)
            logger.setLevel(level)
            logger.propagate = False  # to handlers that the program's libraries have set up
        self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._status.stop()
        for name, (level, propagates) in self._before.items():
            logger = logging.getLogger(name)
            logger.removeHandler(self)
            logger.setLevel(level)
            logger.propagate = propagates
