"""The exceptions of meshdsl, and their common format.

Faults are reported before anything is compiled, all of them at once, in the words of the user's program:

    <what failed>
      <argument>: <given value> ... <expected value>; <nearest valid name>
      ...
    <remedy>

All exceptions derive from :class:`MeshDSLError` and are exported by ``meshdsl``: ``except md.PinError``.
"""

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from inspect import Parameter, signature
from types import FunctionType


class MeshDSLError(Exception):
    """Base class of all exceptions of meshdsl.

    Example:
      >>> try:
      ...     md.topology("dgx-h10")
      ... except md.MeshDSLError as error:
      ...     print(error)
      no topology 'dgx-h10'; did you mean 'dgx-h100'?
    """


class NotationError(MeshDSLError):
    """A text that is not a mesh, placement, layout or list of dims; the message marks the place with a caret.

    Example:
      >>> try:
      ...     md.Layout.parse("data=R")
      ... except md.NotationError as error:
      ...     print(error)
      a placement is S(dim), B, P, P(max) or P(min), not 'R'
        data=R
             ^
    """


class LayoutError(MeshDSLError):
    """A layout that does not fit its tensor or its mesh, or an input that a plan does not have.

    Example:
      >>> try:
      ...     md.parallelize(jnp.sin, "data=8").plan(jnp.ones(8)).layout("y")
      ... except md.LayoutError as error:
      ...     print(error)
      no input 'y' in the plan; known: x
    """


class PinError(MeshDSLError):
    """Pins that match no array, contradict each other or cannot be met.

    Example:
      >>> try:
      ...     md.parallelize(jnp.sin, "data=8", {"y": "data=S(0)"}).plan(jnp.ones(8))
      ... except md.PinError as error:
      ...     print(error)
      the pins of sin do not fit, on mesh data=8:
        layouts['y']: matches no input; known: x
      arguments: x; '*' is one path component, '**' any number
    """


class ArgumentError(MeshDSLError):
    """Invalid arguments of a function of meshdsl.

    Example:
      >>> try:
      ...     md.parallelize(jnp.sin, "data=8", memory="8GBs")
      ... except md.ArgumentError as error:
      ...     print(error)
      invalid arguments of parallelize(sin, ...):
        memory='8GBs' is not a size; write bytes, or text like '60GiB' or '500MB'
    """


class DimError(MeshDSLError):
    """Named dims that a tensor lacks, has twice or has with another size.

    Example:
      >>> try:
      ...     md.dims("embed=512")["embd"]
      ... except md.DimError as error:
      ...     print(str(error).splitlines()[0])
      no dim 'embd' in [embed=512]; did you mean 'embed'?
    """


class TraceError(MeshDSLError):
    """A step that cannot be traced, or arguments that it cannot be called with.

    Example:
      >>> try:
      ...     md.parallelize(jnp.sin, "data=8").plan("text")
      ... except md.TraceError as error:
      ...     print(error)
      sin cannot be traced:
        x: 'text' is a str, not an array
      pass values that are not arrays through static_argnames
    """


class RuleError(MeshDSLError):
    """A sharding rule that cannot be parsed, does not fit its operands, or does not hold.

    Example:
      >>> try:
      ...     md.rule("a b -> c")(jnp.tanh)
      ... except md.RuleError as error:
      ...     print(error)
      'a b -> c' is not a rule:
        c is in a result, but in no operand; write _ if it cannot be split
      a rule reads 'b m k, b k n -> b m n'
    """


class ScheduleError(MeshDSLError):
    """A pipeline schedule that is unknown or cannot run.

    Example:
      >>> try:
      ...     md.make_schedule("zb-q", ranks=2, microbatches=2)
      ... except md.ScheduleError as error:
      ...     print(error)
      no schedule 'zb-q'; did you mean 'zb-v'?
    """


class PipelineError(MeshDSLError):
    """A step that cannot be split into microbatches or pipeline stages.

    Example:
      >>> try:
      ...     md.parallelize(jnp.sin, "data=8", pipeline=md.Pipeline(4)).plan(jnp.ones(8))
      ... except md.PipelineError as error:
      ...     print(error)
      microbatches=4 of sin:
        every argument is replaced by a result: name the batch with Pipeline(batch=...)
    """


class MemoryLimitError(MeshDSLError):
    """No plan within the memory limit was found.

    Example:
      >>> try:
      ...     md.parallelize(jnp.sin, "data=8", memory="1B").plan(jnp.ones(8))
      ... except md.MemoryLimitError as error:
      ...     print(error)
      no plan fits memory=1 B per device; the least possible is 8 B at sin (?), held by:
        4 B: x
        4 B: sin at ?
      infeasible: the arguments alone need 4 B per device, even fully sharded under their pins
      use more devices, a smaller batch, jax.checkpoint, or raise memory=

    Attributes:
      least: peak in bytes of the smallest plan found; 0 if none was looked for.
    """

    least: int = 0


class DeviceError(MeshDSLError):
    """The available devices do not match the mesh or the target.

    Example:
      >>> try:
      ...     md.parallelize(jnp.sin, "data=99")(jnp.ones(99))
      ... except md.DeviceError as error:
      ...     print(error)
      mesh data=99 needs 99 devices, and there are 8 (cpu)
      To try it on one CPU: JAX_NUM_CPU_DEVICES=99, or before anything runs jax.config.update('jax_num_cpu_devices', 99)
    """


class PlanFileError(MeshDSLError):
    """A plan file that is damaged, or belongs to another version, program, mesh or arguments.

    Example:
      >>> try:
      ...     md.load_plan("absent.json")
      ... except md.PlanFileError as error:
      ...     print(error)
      cannot read the plan file 'absent.json': No such file or directory
    """


class CheckpointError(MeshDSLError):
    """A checkpoint that cannot be written or read: no space, no permission, no such place.

    Example:
      >>> from meshdsl.training.saving.checkpoint import Checkpoints
      >>> try:
      ...     Checkpoints("/proc/run")
      ... except md.CheckpointError as error:
      ...     print(error)
      /proc/run cannot hold checkpoints: [Errno 2] No such file or directory: '/proc/run'
    """


class NonFiniteError(MeshDSLError):
    """A training run whose loss or state holds NaNs or infinities, which is not saved.

    Example:
      >>> try:
      ...     train(step, state, feed, Run(steps=300, folder=folder))
      ... except md.NonFiniteError as error:
      ...     print(error)  # the loss of step 211 is nan
    """


class VerifyError(MeshDSLError):
    """A compiled program whose communication differs from the plan.

    Example:
      >>> try:
      ...     sharded.verify(*args)
      ... except md.VerifyError as error:
      ...     print(error)
    """


class OverlapError(VerifyError):
    """A program compiled for a target that hides less of its communication than the plan promises.

    Example:
      >>> try:
      ...     sharded.verify(*args, target="tpu-v5e:4x4", exposed="error")
      ... except md.OverlapError as error:
      ...     print(error)
    """


class CheckError(MeshDSLError):
    """Results of the sharded step that differ from those of the unsharded step.

    Example:
      >>> try:
      ...     md.parallelize(lambda x: None, "data=8").check(jnp.ones(8))
      ... except md.CheckError as error:
      ...     print(error)
      step returns no arrays, so there is nothing to compare
      return what the step computes
    """


class BudgetError(MeshDSLError, AssertionError):
    """A plan or program that communicates more than a test allows; also an AssertionError.

    Example:
      >>> plan = md.parallelize(jnp.sum, "data=8", md.data_parallel()).plan(jnp.ones(8))
      >>> try:
      ...     plan.assert_at_most(bytes=0)
      ... except md.BudgetError as error:
      ...     print(error)
      the plan of sum on data=8 exceeds its budget:
        bytes: 7 per device and step, at most 0 allowed
    """


def is_a(x: object) -> str:
    """Return ``"'p.json' is a str"``; classes of other packages are prefixed with the package's name."""
    package = type(x).__module__.partition(".")[0]
    name = type(x).__name__ if package in ("builtins", "meshdsl", "__main__") else f"{package}.{type(x).__name__}"
    shown = repr(x).partition("\n")[0][:60]
    return f"{shown} is {'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def called(x: object) -> str:
    """Return ``"; call it: fsdp()"`` for a function, given where its result is meant; else nothing."""
    return f"; call it: {x.__name__}()" if isinstance(x, FunctionType) else ""


def required_parameters(function: FunctionType) -> list[str]:
    """Return the names of the parameters that a call without arguments lacks."""
    given = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
    parameters = signature(function).parameters.values()
    return [each.name for each in parameters if each.default is Parameter.empty and each.kind not in given]


def nearest(name: object, known: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` for the closest of the known names, else a list of all of them."""
    known = list(known)
    return likely(str(name), known) or (f"; known: {', '.join(known)}" if known else "")


def likely(name: object, known: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` if one of the known names is close, else nothing: for errors that list them."""
    close = get_close_matches(name, list(known), n=1, cutoff=0.5) if isinstance(name, str) else []
    return f"; did you mean {close[0]!r}?" if close else ""


def shortened(rows: Sequence[str], most: int = 8) -> list[str]:
    """Return the first rows, and a row with the number of others."""
    more = len(rows) - most
    return [*rows[:most], f"... and {more} more"] if more > 0 else list(rows)


def first_line(error: Exception) -> str:
    """Return the first line of a message, without the text and caret below it."""
    return str(error).partition("\n")[0]


def faults(title: str, rows: Iterable[str], remedy: str = "") -> str:
    """Return a message in the common format: a title, an indented row per fault, a remedy."""
    lines = [title, *(f"  {row}" for row in rows)]
    return "\n".join([*lines, remedy] if remedy else lines)


def first_fault(error: MeshDSLError) -> str:
    """Return the first fault that an error lists, or its first line."""
    first, *rows = str(error).splitlines()
    return rows[0].strip() if rows and first.endswith(":") else first
