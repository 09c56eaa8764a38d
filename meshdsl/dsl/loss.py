"""Losses over named dims."""

from typing import Any

from meshdsl.dsl.array import Tensor
from meshdsl.dsl.dims import DimsLike
from meshdsl.dsl.index import take
from meshdsl.dsl.reduce import logsumexp


def cross_entropy(logits: Any, labels: Any, over: DimsLike) -> Tensor:
    """The negative log-likelihood of each label.

    Args:
      logits: with the dim of classes, ``[batch seq vocab]``.
      labels: integers, without that dim, ``[batch seq]``.
      over: the dim of classes.

    Returns one value per label, in the dims that are left of the logits.
    """
    return logsumexp(logits, over) - take(logits, labels, over)
