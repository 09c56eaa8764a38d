"""Device groups in every notation of compiled programs."""

import numpy as np
import pytest

from meshdsl.lowering.hlo.collectives import axes_of_groups, axes_of_pairs, replica_groups, source_target_pairs

SIZES = {"x": 4, "y": 2}
ALONG_X = ((0, 2, 4, 6), (1, 3, 5, 7))
ALONG_Y = ((0, 1), (2, 3), (4, 5), (6, 7))
NOTATIONS = {
    "{{0,2,4,6},{1,3,5,7}}": ALONG_X,
    "{{0,1},{2,3},{4,5},{6,7}}": ALONG_Y,
    "{}": (tuple(range(8)),),
    "[4,2]<=[8]": ALONG_Y,
    "[2,4]<=[4,2]T(1,0)": ALONG_X,
    "mesh['x'=4,'y'=2] {'x'}": ALONG_X,
    "mesh['x'=4,'y'=2] {'x','y'}": (tuple(range(8)),),
    "mesh['a'=8] {'a':(4)2}": ALONG_Y,
    "mesh['a'=8] {'a':(1)4}": ALONG_X,
    "mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}": ALONG_X,
    "mesh['a'=2,'b'=4], device_ids=(0,2,4,6,1,3,5,7) {'b'}": ALONG_X,
}


@pytest.mark.parametrize(("text", "groups"), NOTATIONS.items())
def test_notations(text, groups):
    assert replica_groups(f"channel_id=1, replica_groups={text}, use_global_device_ids=true", 8) == groups


@pytest.mark.parametrize(
    ("groups", "axes"),
    [
        (ALONG_X, ("x",)),
        (ALONG_Y, ("y",)),
        ((tuple(range(8)),), ("x", "y")),
        (((7, 6), (5, 4), (3, 2), (1, 0)), ("y",)),
        (tuple((i,) for i in range(8)), ()),
        (((0, 2), (4, 6), (1, 3), (5, 7)), None),
        (((0, 3), (1, 2), (4, 7), (5, 6)), None),
        (((0, 1), (2, 3)), None),
    ],
)
def test_axes(groups, axes):
    assert axes_of_groups(groups, SIZES) == axes


def test_axes_of_every_subset():
    sizes = {"a": 2, "b": 3, "c": 2}
    grid = np.arange(12).reshape(2, 3, 2)
    groups = tuple(map(tuple, grid.transpose(1, 0, 2).reshape(3, 4).tolist()))
    assert axes_of_groups(groups, sizes) == ("a", "c")


def test_pairs():
    pairs = source_target_pairs("channel_id=3, source_target_pairs={{0,2},{2,4},{4,6}}, metadata={}")
    assert pairs == ((0, 2), (2, 4), (4, 6))
    assert axes_of_pairs(pairs, SIZES) == ("x",)
    assert axes_of_pairs(((0, 3),), SIZES) == ("x", "y")
    assert axes_of_pairs(((1, 1),), SIZES) == ()
