"""A step that a training function, or a script, defines inside itself and compiles: found without a change to it.

While the author's code runs, the function that compiles steps (``jax.jit``, ``jax.pmap``, ``equinox.filter_jit``) hands
out, for the step of the name sought, one that ends the run at its first call and keeps what it was called with.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any, TypeVar
from unittest import mock

Use = TypeVar("Use")


class _Called(Exception):
    """The first call of the step that was sought, and what was made of it."""

    def __init__(self, used: Any) -> None:
        self.used = used


def first_call(train: Callable[[], Any], compile_with: str, name: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Returns the step of this name, not compiled, and the arguments of its first call.

    Args:
      train: runs the author's training, which calls the step.
      compile_with: what compiles it, as ``"jax.jit"``.
      name: of the step.

    Raises:
      LookupError: the training ended without calling it.
    """
    return at_first_call(train, compile_with, name, lambda step, jitted, args: (step, args))


def at_first_call(
    train: Callable[[], Any],
    compile_with: str,
    name: str,
    use: Callable[[Callable[..., Any], Callable[[], Any], tuple[Any, ...]], Use],
) -> Use:
    """Returns what ``use`` makes of the step at its first call, under the author's meshes, settings and contexts.

    Args:
      use: takes the step, a function that returns it as the author compiles it, and its arguments.
    """
    module, _, attribute = compile_with.rpartition(".")
    real = getattr(import_module(module), attribute)

    def compiled(step: Callable[..., Any], *given: Any, **options: Any) -> Callable[..., Any]:
        if getattr(step, "__name__", None) != name:
            return real(step, *given, **options)

        def call(*args: Any) -> Any:
            raise _Called(use(step, lambda: real(step, *given, **options), args))

        return call

    with mock.patch(compile_with, compiled):
        try:
            train()
        except _Called as found:
            used: Use = found.used
            return used
    raise LookupError(f"{name} was not called")
