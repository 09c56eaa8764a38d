"""Lines of Python in parts of one colour each, by Pygments."""

from functools import cache
from itertools import groupby
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pygments.lexer import Lexer

_CLASSES = {"Keyword": "keyword", "Operator.Word": "keyword", "Literal.String": "string", "Literal.Number": "literal"}
_CLASSES |= {"Comment": "comment", "Name.Decorator": "called", "Name.Builtin": "called", "Name.Function": "called"}


def highlighted(line: str) -> list[list[str | int]]:
    """Returns the parts of a line of Python, each with its class in the page's style and its number of characters.

    The line is read by itself: inside a string over several lines it may be coloured as code.

    Example:
      >>> highlighted("return x")
      [['keyword', 6], ['', 2]]
    """
    tokens = _lexer().get_tokens_unprocessed(line)
    parts = [(_kind(str(token).removeprefix("Token.")), len(text)) for _, token, text in tokens]
    return [[kind, sum(length for _, length in run)] for kind, run in groupby(parts, lambda part: part[0])]


def _kind(token: str) -> str:
    return next((name for prefix, name in _CLASSES.items() if f"{token}.".startswith(f"{prefix}.")), "")


@cache
def _lexer() -> "Lexer":
    from pygments.lexers.python import PythonLexer  # only reports need it

    return PythonLexer()
