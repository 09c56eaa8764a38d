"""The module of a program before XLA's partitioner, after it, and after all other passes.

XLA writes them to a folder while it compiles, if it is told to by options of the compilation.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import jax
from jax.experimental.compilation_cache import compilation_cache

from meshdsl.errors import DeviceError

_PASS = "spmd-partitioning"


@dataclass(frozen=True)
class CompiledModules:
    """The HLO text of one program, as it is compiled.

    Args:
      whole: before the partitioner: whole arrays, with shardings as annotations.
      partitioned: after it: blocks of arrays, and collectives.
      optimized: as it runs.
    """

    whole: str
    partitioned: str
    optimized: str


def compiled_modules(lowered: jax.stages.Lowered) -> CompiledModules:
    """Compile a program once more, and return its text before and after the partitioner.

    Raises:
      DeviceError: the compiler of these devices does not write it, as those of absent devices do not.
    """
    with TemporaryDirectory() as folder:
        options: dict[str, str | bool] = {
            "xla_dump_to": folder,
            "xla_dump_hlo_pass_re": _PASS,
            "xla_dump_large_constants": True,
            "xla_backend_optimization_level": "0",  # of machine code, which never runs; HLO is the same
        }
        with _uncached():
            lowered.compile(compiler_options=options)
        texts = {file.name: file.read_text(encoding="utf-8") for file in sorted(Path(folder).glob("*.txt"))}

    def named(part: str, module: str = "") -> dict[str, str]:
        return {name: text for name, text in texts.items() if part in name and name.startswith(module)}

    before, start = named(f".before_{_PASS}."), named(".before_optimizations.txt")
    if not before and len(start) == 1:  # a program of no arguments is not partitioned
        before = start
    module = next(iter(before), "").split(".")[0] + "."  # a compiler may write small programs beside it
    partitioned = named(f".after_{_PASS}.", module) or before
    optimized = named("after_optimizations.txt", module)
    if [len(each) for each in (before, partitioned, optimized)] != [1, 1, 1]:
        written = ", ".join(texts) or "nothing"
        raise DeviceError(f"the compiler does not write its program before and after the partitioner, but {written}")
    return CompiledModules(*(text for each in (before, partitioned, optimized) for text in each.values()))


@contextmanager
def _uncached() -> Iterator[None]:
    """Without jax's persistent cache, whose programs are not compiled again, within a context."""
    used = jax.config.jax_enable_compilation_cache  # type: ignore[attr-defined]
    if not (used and jax.config.jax_compilation_cache_dir):  # type: ignore[attr-defined]
        yield
        return
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", used)
        compilation_cache.reset_cache()
