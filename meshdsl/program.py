"""Program: a step with everything that planning, training and the command line need to know."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from meshdsl.errors import ArgumentError, faults, is_a
from meshdsl.layouts.layout import Layout
from meshdsl.layouts.rules import Rules
from meshdsl.pipeline.spec import Pipeline


@dataclass(frozen=True)
class Program:
    """What a program file defines as ``program``, or returns from ``program()``.

    Args:
      step: the function that is planned.
      args: its arguments, arrays or ``jax.ShapeDtypeStruct``; tuples are positional.
      layouts: pins by globs over the arguments' paths.
      rules: mesh axes by named dims, a text or ``md.Rules``.
      pipeline: how the step takes its batch in microbatches.
      overlap: whether the plan is chosen by the time with overlap, as ``parallelize`` does it.
      init: makes the arguments that the step replaces, for training.
      batches: the batches of a training run, from the first: ``meshdsl.training.batches.Batches`` or any iterable.
      evaluate: ``(*state) -> {"held-out loss": 1.3, ...}``, measured on the trained arguments.
      steps: how long a training run is if nothing else is said.
    """

    step: Callable[..., Any]
    args: tuple[Any, ...]
    layouts: Mapping[str, Layout | str] | None = None
    rules: Rules | str | None = None
    pipeline: Pipeline | None = None
    init: Callable[..., Any] | None = None
    batches: Callable[..., Iterable[Any]] | None = None
    evaluate: Callable[..., Mapping[str, Any]] | None = None
    steps: int | None = None
    overlap: bool = False

    def __post_init__(self) -> None:
        """Refuse what is no program."""
        callables = [name for name in ("step", "init", "batches", "evaluate") if self._is_no_function(name)]
        rows = [f"{name}: {is_a(getattr(self, name))}, not a function" for name in callables]
        if not isinstance(self.args, tuple):
            rows.append(f"args: {is_a(self.args)}, not the tuple of the step's arguments")
        if self.layouts is not None and not isinstance(self.layouts, Mapping):
            rows.append(f"layouts: {is_a(self.layouts)}, not a dict of layouts by globs")
        if self.rules is not None and not isinstance(self.rules, Rules | str):
            rows.append(f"rules: {is_a(self.rules)}, not layout rules, such as 'batch:data hidden:model'")
        if self.pipeline is not None and not isinstance(self.pipeline, Pipeline):
            rows.append(f"pipeline: {is_a(self.pipeline)}, not a pipeline, such as md.Pipeline(microbatches=8)")
        if self.steps is not None and (not isinstance(self.steps, int) or self.steps < 1):
            rows.append(f"steps: {is_a(self.steps)}, not a number of training steps")
        if not isinstance(self.overlap, bool):
            rows.append(f"overlap: {is_a(self.overlap)}, neither True nor False")
        if rows:
            raise ArgumentError(faults("arguments of Program that do not fit:", rows))

    def _is_no_function(self, name: str) -> bool:
        value = getattr(self, name)
        return not callable(value) and (value is not None or name == "step")
