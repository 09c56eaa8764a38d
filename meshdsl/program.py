"""Program: a step with everything that planning, training and the command line need to know."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from meshdsl.layouts.layout import Layout


@dataclass(frozen=True)
class Program:
    """What a program file defines as ``program``, or returns from ``program()``.

    Args:
      step: the function that is planned.
      args: its arguments, arrays or ``jax.ShapeDtypeStruct``; tuples are positional.
      layouts: pins by globs over the arguments' paths.
      rules: mesh axes by named dims.
      pipeline: how to run the step as a pipeline.
      init: makes the arguments that the step replaces, for training.
      batches: the batches of a training run.
      evaluate: measures the held-out loss of the trained arguments.
    """

    step: Callable[..., Any]
    args: tuple[Any, ...]
    layouts: Mapping[str, Layout | str] | None = None
    rules: Any = None
    pipeline: Any = None
    init: Callable[..., Any] | None = None
    batches: Callable[..., Iterable[Any]] | None = None
    evaluate: Callable[..., Any] | None = None
