"""The time that planning may take, if somebody has said so.

What the planner spends is counted in work, so that the same step has the same plan everywhere. A limit in seconds is
another thing: where it is reached, what would only improve the plan or its bound is left out.
"""

import time


class Clock:
    """Asked between the parts of a search whether there is time for another.

    Args:
      seconds: from now on; None for any time.
    """

    def __init__(self, seconds: float | None = None) -> None:
        self.seconds, self._end = seconds, None if seconds is None else time.perf_counter() + seconds
        self.has_stopped = False

    def is_up(self) -> bool:
        """Whether time is up; who asks leaves something out then."""
        self.has_stopped |= self._end is not None and time.perf_counter() >= self._end
        return self.has_stopped
