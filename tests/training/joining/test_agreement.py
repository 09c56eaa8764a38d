"""Facts that all processes of a run have in common; the processes are threads here."""

import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest

from meshdsl.errors import ArgumentError
from meshdsl.training.joining.agreement import check_common


@pytest.fixture
def agree(monkeypatch):
    """What each process says of its facts; None if nothing."""

    def run(*facts):
        own, barrier, gathered = threading.local(), threading.Barrier(len(facts)), [None] * len(facts)

        def gather(value):
            gathered[own.index] = value
            barrier.wait(10)
            rows = np.stack(gathered)
            barrier.wait(10)
            return rows

        def one(index):
            own.index = index
            try:
                check_common(facts[index])
            except ArgumentError as error:
                return str(error)

        monkeypatch.setattr(jax, "process_count", lambda: len(facts))
        monkeypatch.setattr("jax.experimental.multihost_utils.process_allgather", gather)
        with ThreadPoolExecutor() as pool:
            return list(pool.map(one, range(len(facts))))

    return run


FACTS = {"jax": "0.10", "step": "f 1a", "arguments": "w f32[8]; x f32[4]; y f32[2]", "data": "256"}


@pytest.mark.parametrize(("changes", "said"), [
    ([{}, {}], None),
    ([{}, {"data": "255"}], "data: 255 in process 1, 256 in process 0"),
    ([{}, {}, {"step": "f 2b", "data": "255"}, {"step": "f 2b"}],
     "step: f 2b in processes 2, 3, f 1a in process 0; data: 255 in process 2, 256 in process 0"),
    ([{}, {"arguments": "w f32[8]; x f32[5]"}], "arguments: x f32[5] in process 1, x f32[4] in process 0"),
    ([{}, {"arguments": "w f32[8]"}], "arguments: nothing more in process 1, x f32[4] in process 0"),
])  # fmt: skip
def test_what_differs_is_said_by_all(agree, changes, said):
    whole = f"the processes do not train the same: {said}; give all the same program, data and versions"
    assert agree(*({**FACTS, **each} for each in changes)) == [said and whole] * len(changes)
