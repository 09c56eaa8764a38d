"""Tables in notebooks: HTML that fits its cell and takes its colours from the notebook, light or dark."""

from collections.abc import Iterable, Sequence
from html import escape

_STYLE = "overflow-x:auto;max-width:100%"
_CELL = "text-align:left;vertical-align:top;padding:.15em .9em .15em 0"
_SHORT = 24  # characters of a cell that stays on one line


def tables_html(title: str, tables: Iterable[Sequence[Sequence[str]]]) -> str:
    """Returns a title and tables as HTML; texts may hold anything.

    Args:
      title: its lines are kept.
      tables: rows of texts of equal number; the first row of each is its head.
    """
    head = escape(title).replace("\n", "<br>")
    return f'<div class="meshdsl" style="{_STYLE}"><p>{head}</p>{"".join(map(_table, tables))}</div>'


def _table(rows: Sequence[Sequence[str]]) -> str:
    head, *body = rows
    return f"<table><thead>{_row(head, 'th')}</thead><tbody>{''.join(_row(row, 'td') for row in body)}</tbody></table>"


def _row(texts: Sequence[str], tag: str) -> str:
    return f"<tr>{''.join(_cell(text, tag) for text in texts)}</tr>"


def _cell(text: str, tag: str) -> str:
    wrapping = "white-space:nowrap" if len(text) <= _SHORT else "overflow-wrap:anywhere"
    return f'<{tag} style="{_CELL};{wrapping}">{escape(text)}</{tag}>'
