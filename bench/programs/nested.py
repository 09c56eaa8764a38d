"""A step that a training function, or a script, defines inside itself and compiles: found without a change to it.

While the author's code runs, the function that compiles steps (``jax.jit``, ``jax.pmap``, ``equinox.filter_jit``) hands
out, for the step of the name sought, one that ends the run at its first call and keeps what it was called with.
"""

from collections.abc import Callable
from typing import Any
from unittest import mock


class _Called(Exception):
    """The first call of the step that was sought."""

    def __init__(self, step: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self.step, self.args = step, args


def first_call(train: Callable[[], Any], compile_with: str, name: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Returns the step of this name, not compiled, and the arguments of its first call.

    Args:
      train: runs the author's training, which calls the step.
      compile_with: what compiles it, as ``"jax.jit"``.
      name: of the step.

    Raises:
      LookupError: the training ended without calling it.
    """
    module, _, attribute = compile_with.rpartition(".")
    real = getattr(__import__(module), attribute)

    def compiled(step: Callable[..., Any], *args: Any, **options: Any) -> Callable[..., Any]:
        if getattr(step, "__name__", None) != name:
            return real(step, *args, **options)

        def call(*args: Any) -> Any:
            raise _Called(step, args)

        return call

    with mock.patch(compile_with, compiled):
        try:
            train()
        except _Called as found:
            return found.step, found.args
    raise LookupError(f"{name} was not called")
