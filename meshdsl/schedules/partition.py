"""Which layers each stage gets: the contiguous partition whose largest stage is smallest.

All stages work in lockstep, so a tick takes as long as the largest of them: with m microbatches and p stages a step
takes ``(m + p - 1) * largest``, and the total over stages does not matter. The least largest stage is found by dynamic
programming (PipeDream; Narayanan et al. 2019, without their term for replicas, which are another mesh axis here):

    largest(j, s) = min over i < j of max(largest(i, s - 1), seconds of layers i to j as stage s)

Embedding and head run on all devices, not on a stage. They break ties: among partitions with the same largest stage,
the one is taken whose largest stage is least if the first stage also had the embedding, and the last one the head. So
these two get fewer layers.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise
from math import inf

from meshdsl.schedules.schedule import Schedule
from meshdsl.schedules.spec import Pipeline


def partition_layers(
    layers: Sequence[float], stages: int, first: float = 0.0, last: float = 0.0, at_last: Sequence[float] = ()
) -> tuple[int, ...]:
    """Returns layers per stage, at least one each.

    Args:
      layers: seconds of every layer.
      stages: at most the number of layers.
      first: seconds of the work that would come with the first stage.
      last: seconds of the work that would come with the last stage.
      at_last: seconds of every layer in the last stage, if they differ there.
    """
    sums, last_sums = ([0.0, *accumulate(each)] for each in (layers, at_last or layers))

    def alone(i: int, j: int, stage: int) -> float:
        total = last_sums if stage == stages - 1 else sums
        return float(f"{total[j] - total[i]:.9g}")  # rounded, so that sums of equal layers are equal

    def with_ends(i: int, j: int, stage: int) -> float:
        seconds = alone(i, j, stage)
        return inf if seconds > largest else seconds + first * (stage == 0) + last * (stage == stages - 1)

    boundaries = pairwise(_boundaries(len(layers), stages, alone))
    largest = max(alone(i, j, stage) for stage, (i, j) in enumerate(boundaries))
    return tuple(j - i for i, j in pairwise(_boundaries(len(layers), stages, with_ends)))


def _boundaries(layers: int, stages: int, seconds: Callable[[int, int, int], float]) -> tuple[int, ...]:
    """Returns where stages begin and the last one ends; of equal partitions the one with the shortest early stages."""
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, (0,))}
    for stage in range(stages):
        ends = range(stage + 1, layers - (stages - 1 - stage) + 1)
        best = {
            j: min((max(most, seconds(i, j, stage)), (*cuts, j)) for i, (most, cuts) in best.items() if i < j)
            for j in ends
        }
    return best[layers][1]


def partition_faults(layers: int, ranks: int, pipeline: Pipeline, noun: str = "layers") -> Iterator[str]:
    """Yields why so many layers, or parts, cannot be partitioned over so many ranks."""
    schedule, stages = pipeline.schedule, ranks * pipeline.chunks
    if isinstance(schedule, Schedule) and len(schedule.ranks) != ranks:
        yield f"the schedule is for {len(schedule.ranks)} ranks, and there are {ranks}"
        return
    text = f"{pipeline.chunks} chunks for each of {ranks} stages" if pipeline.chunks > 1 else f"{ranks} stages"
    if layers < stages:
        chunked = pipeline.chunks > 1 and layers >= ranks
        fewer = f"at most {layers // ranks} chunks" if chunked else f"at most {layers} stages"
        yield f"{layers} {noun} are too few for {text}; use at least {stages} {noun}, or {fewer}"
    elif pipeline.layers and len(pipeline.layers) != stages:
        yield f"layers={pipeline.layers} has {len(pipeline.layers)} numbers; {text} take {stages}"
    elif pipeline.layers and sum(pipeline.layers) != layers:
        yield f"layers={pipeline.layers} are {sum(pipeline.layers)} {noun}, and there are {layers}"
