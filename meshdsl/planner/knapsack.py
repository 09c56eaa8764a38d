"""As many of some things as pay, where there is room for what they need: a small integer program, solved by HiGHS."""

from typing import Any

import numpy as np

from meshdsl.planner.exact import Costs, Ids

_GAP, _NODES = 1e-4, 500  # part of the gain that may be left, and nodes of branch and bound


def packed_in(gains: Costs, needs: Costs, counts: Ids, room: Costs) -> Ids:
    """How many to take of each kind of things, of ``counts`` that there are, to gain most.

    Args:
      gains: of one of each kind. needs: [kinds, places], what it takes up in each place; below 0 if it makes room.
      room: per place; none is passed by.

    Where there is not room enough whatever is taken, nothing is.
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
    model.integrality_ = [highspy.HighsVarType.kInteger] * kinds
    highs: Any = highspy.Highs()  # type: ignore[no-untyped-call]
    options = (("output_flag", False), ("mip_rel_gap", _GAP), ("mip_max_nodes", _NODES), ("threads", 1))
    for option, value in options:
        highs.setOptionValue(option, value)
    highs.passModel(model)
    highs.run()
    found = np.array(highs.getSolution().col_value)
    return np.rint(found).astype(np.intp) if found.size else np.zeros(kinds, dtype=np.intp)
