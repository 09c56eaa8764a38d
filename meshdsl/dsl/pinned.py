"""Rules for what is computed inside a step: every named result carries its layout to the planner.

While a step is traced under ``Rules(activations=...)``, the operations of the DSL state the layout
of what they compute, as ``md.constrain`` does; at any other time nothing is added. The rules in
force are part of the key under which jax keeps traced functions, so none is traced under one set
of rules and used under another.
"""

from contextlib import AbstractContextManager
from typing import Any

import jax

from meshdsl.dsl.blame import fail, shown
from meshdsl.dsl.order import Names
from meshdsl.layouts.rules import Table, conflicts, layout_of
from meshdsl.stated import state

_inside = jax.make_user_context(None)


def pinning(table: Table | None) -> AbstractContextManager[Any]:
    """Within it, results are pinned by these rules."""
    manager: AbstractContextManager[Any] = _inside(tuple(table.items()) if table else None)
    return manager


def pinned(array: Any, dims: Names) -> Any:
    """A computed array with these dims, its layout stated if rules are in force that speak of one of them."""
    rules = _inside.value
    if not rules or not dims:
        return array
    table = dict(rules)
    wrong = conflicts(dims, table)
    if wrong:
        raise fail([f"activations, [{shown(dims, array.shape)}]: {row}" for row in wrong])
    layout = layout_of(dims, table)
    return state(array, layout, dims) if layout.axes else array
