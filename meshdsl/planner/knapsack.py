"""As many of some things as pay, where there is room for what they need.

A few things are an integer program, which HiGHS solves. Of many, those are taken that its relaxation takes as a whole,
which are all but as many as there are places, and then what there is still room for.
"""

from typing import Any

import numpy as np

from meshdsl.planner.exact import Costs, Ids

_WHOLE = 1e-6  # that a part may miss
_FEW = 100  # things that are an integer program


def packed_in(gains: Costs, needs: Costs, counts: Ids, room: Costs) -> Ids:
    """How many to take of each kind of things, of ``counts`` that there are, to gain most.

    Args:
      gains: of one of each kind. needs: [kinds, places], what it takes up in each place; below 0 if it makes room.
      room: per place; none is passed by.

    Where there is not room enough whatever is taken, nothing is, or too much: the caller looks at what comes of it.
    """
    import highspy

    most = max(np.abs(gains).max(initial=0.0), 1.0)
    largest = np.maximum(np.abs(needs).max(axis=0, initial=1.0), np.abs(room))
    model, kinds, places = highspy.HighsLp(), gains.size, room.size
    model.num_col_, model.num_row_ = kinds, places
    model.col_cost_, model.col_lower_, model.col_upper_ = -gains / most, np.zeros(kinds), counts.astype(np.float64)
    model.row_lower_, model.row_upper_ = np.full(places, -highspy.kHighsInf), room / largest
    model.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    model.a_matrix_.start_ = np.arange(places + 1) * kinds
    model.a_matrix_.index_, model.a_matrix_.value_ = np.tile(np.arange(kinds), places), (needs / largest).T.ravel()
    few = counts.sum() <= _FEW
    model.integrality_ = [highspy.HighsVarType.kInteger] * kinds if few else []
    highs: Any = highspy.Highs()  # type: ignore[no-untyped-call]
    for option, value in (("output_flag", False), ("threads", 1)):
        highs.setOptionValue(option, value)
    highs.passModel(model)
    highs.run()
    found = np.array(highs.getSolution().col_value)
    if not found.size:
        return np.zeros(kinds, dtype=np.intp)
    return np.rint(found).astype(np.intp) if few else _filled(found, gains, needs, counts, room)


def _filled(found: Costs, gains: Costs, needs: Costs, counts: Ids, room: Costs) -> Ids:
    """What a solution of the relaxation takes as a whole, and besides what there is room for, what gains most first."""
    taken = np.floor(found + _WHOLE).astype(np.intp)
    left = room - taken @ needs
    for i in np.argsort(-gains, kind="stable").tolist():
        more = min(counts[i] - taken[i], 1) if gains[i] > 0 else 0
        if more and (needs[i] <= left).all():
            taken[i] += more
            left = left - needs[i]
    return taken
