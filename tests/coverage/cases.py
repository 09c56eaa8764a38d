"""Cases: one use of one primitive each, from the harnesses with which JAX tests its own exports.

A harness is a function and a description of its arguments. Which ones there are depends on the
version of JAX; they come sorted by name, so a case keeps its place from run to run.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import groupby
from typing import Any

import jax
import numpy as np
from jax._src.internal_test_util import test_harnesses


@dataclass(frozen=True)
class Case:
    """A function of arrays, and the primitive that it is about."""

    primitive: str
    name: str
    harness: Any

    @property
    def supported(self) -> bool:
        """Whether JAX itself claims to run it on CPU."""
        return bool(self.harness.filter("cpu"))

    def args(self) -> list[jax.Array]:
        """Its arguments, the same every time."""
        made = self.harness.dyn_args_maker(np.random.RandomState(0))
        return jax.tree.map(jax.numpy.asarray, list(made))

    def step(self, args: Sequence[Any]) -> Any:
        """The function, of all arrays together."""
        return self.harness.dyn_fun(*args)


def cases(glob: str = "*", limit: int | None = None) -> list[Case]:
    """The cases of the primitives that match, at most ``limit`` of each."""
    found = {h.fullname: Case(h.group_name, h.fullname, h) for h in test_harnesses.all_harnesses}
    chosen = [case for case in found.values() if fnmatchcase(case.primitive, glob)]
    grouped = groupby(sorted(chosen, key=lambda c: (c.primitive, c.name)), lambda c: c.primitive)
    return [case for _, group in grouped for case in _spread(list(group), limit)]


def _spread(group: list[Case], limit: int | None) -> Iterator[Case]:
    """``limit`` cases from all over the group: neighbours differ least."""
    count = len(group) if limit is None else min(limit, len(group))
    return (group[i * len(group) // count] for i in range(count))
