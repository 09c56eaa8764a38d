"""Steps in turns: the batch in microbatches, one after the other.

One module after the other:

    batch       which inputs are the batch
    placing     what of a step is done per microbatch, by the algebra of layouts on an axis in time
    runner      runs a graph on the part of one turn
    accumulate  the step with a loop over microbatches in it
"""

from meshdsl.turns.batch import in_turns
from meshdsl.turns.runner import whole_function

__all__ = ["in_turns", "whole_function"]
