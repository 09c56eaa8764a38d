"""Long sweeps: ``make test`` runs some of their cases, ``pytest`` and ``make test-all`` run all."""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import pytest


def swept(
    names: str | Sequence[str],
    cases: Collection[Any],
    *,
    every: int = 0,
    kind: Callable[[Any], Any] | None = None,
    kept: Collection[Any] = (),
    left: Collection[Any] = (),
    **options: Any,
) -> pytest.MarkDecorator:
    """``pytest.mark.parametrize`` with the mark ``sweep`` on the cases that ``make test`` leaves out.

    Args:
      every: it runs each of this many.
      kind: it runs the first of each kind of case.
      kept: it runs these.
      left: it runs all but these.
    """
    several = "," in names if isinstance(names, str) else True
    seen, marked = set(), []
    for i, case in enumerate(cases):
        first = kind is not None and kind(case) not in seen
        if kind is not None:
            seen.add(kind(case))
        stays = first or (every and i % every == 0) or (kept and case in kept) or (left and case not in left)
        marks = () if stays else (pytest.mark.sweep,)
        marked.append(pytest.param(*(case if several else (case,)), marks=marks))
    return pytest.mark.parametrize(names, marked, **options)
