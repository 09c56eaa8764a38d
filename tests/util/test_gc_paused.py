"""The garbage collector is off while a stage runs, and as it was afterwards, also after an error."""

import gc

import pytest

from meshdsl.util.runtime import gc_paused


@gc_paused
def stage(fails=False):
    if fails:
        raise ValueError("fails")
    return gc.isenabled()


def test_the_collector_is_off_inside_and_on_again_afterwards():
    assert gc.isenabled() and not stage() and gc.isenabled()
    with pytest.raises(ValueError, match="fails"):
        stage(fails=True)
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off():
    gc.disable()
    try:
        assert not stage() and not gc.isenabled()
    finally:
        gc.enable()
