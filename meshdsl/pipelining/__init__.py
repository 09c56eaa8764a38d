"""Steps in turns: the batch in microbatches, one after the other or through stages.

One module after the other:

    batch       which inputs are the batch
    placing     what of a step is done per microbatch, by the algebra of layouts on an axis in time (``places``)
    runner      runs a graph on the part of one turn
    accumulate  the step with a loop over microbatches in it
    split       which scan over layers is a pipeline (``layers``: a scan taken apart)
    stages      which part of a step is a pipeline's stage (``shares``: how many layers, ``dealing``: where they lie)
    pipelined   the step with the loops of a pipeline in it (``rota``: which tick does what; ``lanes``: all stages
                at once, each at its ``work``)
    cut         the same for a step that ``md.stage`` cuts (``parts``: which stage does what; ``branches``: how;
                ``switch``: all of them at once; ``packing``: arrays that are not alike, side by side;
                ``loads``: what it takes)
    parted      the step with the loops of such a pipeline in it
"""

from meshdsl.pipelining.interpreter import whole_function
from meshdsl.pipelining.microbatch import to_microbatches

__all__ = ["to_microbatches", "whole_function"]
