"""Steps in turns: the batch in microbatches, one after the other or through stages.

One module after the other:

    batch       which inputs are the batch
    placing     what of a step is done per microbatch, by the algebra of layouts on an axis in time (``places``)
    runner      runs a graph on the part of one turn
    accumulate  the step with a loop over microbatches in it
    stages      which part of a step is a pipeline's stage
    pipelined   the step with the loops of a pipeline in it (``rota``: which tick does what; ``lanes``: all stages
                at once, each at its ``work``)
"""

from meshdsl.turns.batch import in_turns
from meshdsl.turns.runner import whole_function

__all__ = ["in_turns", "whole_function"]
