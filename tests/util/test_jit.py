"""Compiled loops where no cache can be written."""

import numpy as np
import pytest
from numba.core.caching import CacheImpl

from meshdsl.util.jit import njit_cached


def twice(x):
    return 2 * x


def test_without_a_place_for_a_cache_a_loop_is_compiled_all_the_same(monkeypatch):
    monkeypatch.setattr(CacheImpl, "_locator_classes", [])
    with pytest.raises(RuntimeError, match="no locator available"):
        from numba import njit

        njit(cache=True)(twice)
    np.testing.assert_array_equal(njit_cached(twice)(np.arange(3)), [0, 2, 4])
