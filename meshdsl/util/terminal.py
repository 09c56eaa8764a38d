"""Text on a terminal: as wide as it is, kinds of collectives in the colours of the report; plain text elsewhere."""

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
