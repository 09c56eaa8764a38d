"""How the layers of a model are dealt out to stages, so that none takes much longer than the others.

All stages work in step, so a tick takes as long as the largest of them: with m microbatches and p stages a step takes
``(m + p - 1) * largest``, and what the stages take together does not matter. The least largest stage is found by
dynamic programming over the layers (PipeDream; Narayanan et al. 2019, without their term for replicas, which here is
another mesh axis):

    largest(j, s) = the least, over i < j, of max(largest(i, s - 1), seconds of layers i to j as stage s)

Embedding and head are done by all devices, not by a stage. They decide between ways of which none is longer in step:
that one is taken in which the largest stage is least if the first has the embedding to do besides, and the last the
head. So those two get the fewer layers.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise
from math import inf

from meshdsl.schedules.schedule import Schedule
from meshdsl.schedules.spec import Pipeline


def partition_layers(
    layers: Sequence[float], stages: int, first: float = 0.0, last: float = 0.0, at_last: Sequence[float] = ()
) -> tuple[int, ...]:
    """Layers per stage, at least one each.

    Args:
      layers: seconds of every layer.
      stages: at most as many as there are layers.
      first: seconds of what the first stage would have to do besides.
      last: likewise, the last one.
      at_last: seconds of every layer in the last stage, if it takes another time there.
    """
    sums, ends = ([0.0, *accumulate(each)] for each in (layers, at_last or layers))

    def alone(i: int, j: int, stage: int) -> float:
        total = ends if stage == stages - 1 else sums
        return float(f"{total[j] - total[i]:.9g}")  # sums of equal layers are equal

    def together(i: int, j: int, stage: int) -> float:
        seconds = alone(i, j, stage)
        return inf if seconds > largest else seconds + first * (stage == 0) + last * (stage == stages - 1)

    found = pairwise(_cuts(len(layers), stages, alone))
    largest = max(alone(i, j, stage) for stage, (i, j) in enumerate(found))
    return tuple(j - i for i, j in pairwise(_cuts(len(layers), stages, together)))


def _cuts(layers: int, stages: int, seconds: Callable[[int, int, int], float]) -> tuple[int, ...]:
    """Where stages begin and the last one ends; of equal ways the one in which early stages are short."""
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, (0,))}
    for stage in range(stages):
        ends = range(stage + 1, layers - (stages - 1 - stage) + 1)
        best = {
            j: min((max(most, seconds(i, j, stage)), (*cuts, j)) for i, (most, cuts) in best.items() if i < j)
            for j in ends
        }
    return best[layers][1]


def share_faults(layers: int, ranks: int, asked: Pipeline, noun: str = "layers") -> Iterator[str]:
    """Why so many layers cannot be dealt out."""
    table, stages = asked.schedule, ranks * asked.chunks
    if isinstance(table, Schedule) and len(table.ranks) != ranks:
        yield f"the schedule is for {len(table.ranks)} ranks, and there are {ranks}"
        return
    text = f"{asked.chunks} chunks for each of {ranks} stages" if asked.chunks > 1 else f"{ranks} stages"
    if layers < stages:
        yield f"{layers} {noun} are too few for {text}; use at least {stages} {noun}{_fewer(layers, ranks, asked)}"
    elif asked.layers and len(asked.layers) != stages:
        yield f"layers={asked.layers} has {len(asked.layers)} numbers; {text} take {stages}"
    elif asked.layers and sum(asked.layers) != layers:
        yield f"layers={asked.layers} are {sum(asked.layers)} {noun}, and there are {layers}"


def _fewer(layers: int, ranks: int, asked: Pipeline) -> str:
    if asked.chunks > 1 and layers >= ranks:
        return f", or at most {layers // ranks} chunks"
    return f", or at most {layers} stages"
