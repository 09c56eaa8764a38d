"""Whether the results of a compiled plan are those of the unsharded step, without running either on devices.

The planned program, as it is lowered and as it is compiled, is run on simulated devices beside the step, see
``meshdsl.lowering.simulation``. Floats are random; integers and truth values, which may be indices and masks, are
those of the call if it has values. What collectives round (``low_bits=``) is sent in full there; ``check`` measures it.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from meshdsl.api.ambient import JaxSettings
from meshdsl.api.executable import Executable
from meshdsl.errors import CheckError, DeviceError, first_line
from meshdsl.lowering.partitioner import compiled_modules
from meshdsl.lowering.simulation.check import PlannedModules, ProgramCheck, TooManyElementsError, check_planned
from meshdsl.lowering.simulation.contraction import PRODUCT_COST

SUMS_LIMIT = 1e7  # elements that simulated devices compute, unless asked for more; about a second
_TAKEN = re.compile(r' parameter\(\d+\),.*op_name="leaves\[(\d+)\]"')  # jax leaves out arguments that nothing reads
_PLATFORMS = {"gpu": "cuda"}  # names of platforms in lowering


def check_sums(
    executable: Executable,
    leaves: Sequence[Any],
    reference: Callable[..., Any],
    settings: JaxSettings,
    limit: float,
    is_present: bool,
) -> ProgramCheck | str:
    """Return how the results of a planned program agree with those of the unsharded step; or why that is not known.

    Args:
      leaves: the arguments, flat, or their shapes.
      reference: the unsharded step, on flat arrays. settings: of jax, under which it is lowered.
      limit: elements that may be computed.
      is_present: whether the devices are at hand; else the program is compared as it is lowered only.
    """
    program, executable = executable.program, _in_full(executable)
    if not program.outputs:
        return "the step returns no arrays"
    remedy = "verify smaller arguments, or fewer iterations"
    large = f"more than {limit:g} elements would be computed on simulated devices: {remedy}"
    if executable.expected.flops / 2 * PRODUCT_COST > limit:
        return large
    paths = [leaf.path or "the result" for leaf in program.outputs]
    try:
        modules = _modules(executable, reference, settings, is_present, dict(_integers(leaves)))
        return check_planned(program.name, modules, executable.plan.mesh, paths, limit=limit)
    except TooManyElementsError:
        return large
    except CheckError as error:
        return first_line(error)


def _in_full(executable: Executable) -> Executable:
    """The program with all that is rounded sent in full: rounded numbers agree with none in exact arithmetic."""
    plan = executable.plan
    if not any(c.format for c in plan.collectives):
        return executable
    trees = {value: tuple(step.in_full for step in tree) for value, tree in plan.solution.trees.items()}
    exact = replace(plan, solution=replace(plan.solution, trees=trees))
    return Executable(executable.program, exact, executable.devices, executable.donated, executable.settings)


def _optimized(executable: Executable) -> str:
    """The program as it runs; compiled once more if its text leaves out numbers of constants."""
    text = executable.compiled.as_text() or ""
    if "constant({...})" not in text:
        return text
    try:
        with executable.settings.lowering():
            return compiled_modules(executable.lowered).optimized
    except DeviceError:  # this compiler writes no text
        return text


def _integers(leaves: Sequence[Any]) -> Iterator[tuple[int, np.ndarray]]:
    """The integers and truth values among the arguments, by their places."""
    for i, x in enumerate(leaves):
        lost = isinstance(x, jax.Array) and (x.is_deleted() or not x.is_fully_addressable)
        if isinstance(x, jax.Array) and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) and not lost:
            yield i, np.asarray(jax.random.key_data(x))
        elif hasattr(x, "__array__") and not lost and not jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended):
            array = np.asarray(x)
            if jax.numpy.issubdtype(array.dtype, np.integer) or array.dtype == bool:
                yield i, array


def _modules(
    executable: Executable,
    reference: Callable[..., Any],
    settings: JaxSettings,
    is_present: bool,
    given: Mapping[int, np.ndarray],
) -> PlannedModules:
    """The texts of both programs; arguments that neither jax nor the compiler takes are left out."""
    shapes = [jax.ShapeDtypeStruct(value.shape, value.dtype) for value in executable.program.graph.inputs]
    platform = executable.devices.devices.flat[0].platform
    platforms = None if is_present else (_PLATFORMS.get(platform, platform),)
    jitted = jax.jit(reference, keep_unused=True)
    step = settings.run(lambda: jitted.trace(*shapes).lower(lowering_platforms=platforms))
    lowered = executable.lowered.as_text("hlo", debug_info=True)
    return PlannedModules(
        step.as_text("hlo", debug_info=True),
        lowered,
        _optimized(executable) if is_present else "",
        tuple(int(found) for found in _TAKEN.findall(lowered.partition("\nENTRY ")[2])),
        given,
    )
