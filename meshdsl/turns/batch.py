"""Which inputs are the batch, and whether microbatches divide it."""

from collections.abc import Iterator, Sequence

from meshdsl.errors import PipelineError, faults
from meshdsl.globs import matches, suggest
from meshdsl.ir import Leaf, Program
from meshdsl.pins import follows
from meshdsl.pipeline.spec import Pipeline
from meshdsl.turns.accumulate import accumulate


def in_turns(program: Program, asked: Pipeline) -> Program:
    """The program in microbatches.

    Raises PipelineError if there is no batch, if they do not divide it, or if the step needs it whole.
    """
    batch = find_batch(program, asked)
    made = accumulate(program, asked.microbatches, batch, asked.per_microbatch) if asked.microbatches > 1 else program
    made.pipeline = asked
    return made


def find_batch(program: Program, asked: Pipeline) -> list[int]:
    """Positions of the inputs that are split in microbatches; PipelineError if none are, or if they do not divide."""
    leaves = dict(enumerate(program.inputs))
    if asked.batch is not None:
        found = {i: leaf for i, leaf in leaves.items() if matches(asked.batch, leaf.path)}
        more = suggest(asked.batch, [leaf.path for leaf in program.inputs])
        rows = [] if found else [f"batch={asked.batch!r}: matches no input{more}"]
        rows += [f"{leaf.path} {leaf.type}: has no dim to split" for leaf in found.values() if not leaf.shape]
    else:
        replaced = {i for i in follows(program.inputs, program.outputs) if i is not None}
        found = {i: leaf for i, leaf in leaves.items() if i not in replaced and leaf.shape}
        rows = [] if found else ["every argument is replaced by a result: Pipeline(batch=...) names the batch"]
    rows = rows or list(_uneven(list(found.values()), asked))
    if rows:
        raise PipelineError(faults(f"microbatches={asked.microbatches} of {program.name}:", rows))
    return list(found)


def _uneven(batch: Sequence[Leaf], asked: Pipeline) -> Iterator[str]:
    sizes: dict[int, Leaf] = {}
    for leaf in batch:
        sizes.setdefault(leaf.shape[0], leaf)
    if len(sizes) > 1:
        said = ", ".join(f"{leaf.path} {leaf.type}" for leaf in sizes.values())
        yield f"the first dims of the batch differ: {said}; Pipeline(batch=...) names the arrays of the batch"
    elif next(iter(sizes)) % asked.microbatches:
        n, m = next(iter(sizes)), asked.microbatches
        near = [k for k in range(1, n + 1) if n % k == 0]
        near = sorted(sorted(near, key=lambda k: abs(k - m))[:3])
        said = " or ".join(map(str, near))
        yield f"the batch of {n} ({batch[0].path}) does not divide into {m} microbatches; use {said}"
