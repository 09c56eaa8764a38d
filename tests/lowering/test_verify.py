"""Planned against compiled: equal sums pass, anything else is named."""

from fractions import Fraction

import pytest

from meshdsl.errors import VerifyError
from meshdsl.layouts.mesh import Mesh
from meshdsl.lowering.hlo.collectives import CompiledCollective
from meshdsl.lowering.verify import compare
from tests.lowering.graphs import Planned, verify_text

MESH = Mesh(x=4, y=2, one=1)
GROUPS = "replica_groups={{0,1},{2,3},{4,5},{6,7}}"
TEXT = f"""ENTRY %main (a: f32[8,4]) -> f32[8,4] {{
  %g = f32[16,4]{{1,0}} all-gather(%a), {GROUPS}, dimensions={{0}}
  %r = (f32[8,4]{{1,0}}, f32[8]{{0}}) all-reduce(%a, %b), {GROUPS}, to_apply=%add
}}
"""


def compiled(kind, axes, size, trips=1, known=True):
    return CompiledCollective(kind, axes, 2, Fraction(size), trips, known, False, "")


def equal(planned, found):
    return compare(planned, found, MESH).equal


def test_combined_collectives_are_equal():
    planned = [
        Planned("all-reduce", ("y",), 128, 1),
        Planned("all-reduce", ("y", "one"), 32, 1),
        Planned("all-gather", ("y",), 128, 1),
    ]
    report = verify_text(planned, TEXT, MESH)
    assert str(report).splitlines() == [
        "collective  axes  planned  compiled  planned bytes  compiled bytes",
        "all-gather  y           1         1            128             128",
        "all-reduce  y           2         1            160             160",
        "note: the compiler combined collectives: all-reduce over y, 2 planned, 1 compiled",
    ]


def test_more_collectives_than_planned_are_a_difference():
    """Each costs a latency, also where they send the planned bytes together."""
    parts = [compiled("all-reduce", ("y",), 40, 2), compiled("all-reduce", ("y",), 80)]
    report = compare([Planned("all-reduce", ("y",), 80, 2)], parts, MESH)
    assert not report.equal and "2 3 160 160 1 collectives more" in " ".join(str(report).split())
    assert equal([Planned("all-reduce", ("y",), 160, 1), Planned("all-reduce", ("y",), 0, 2)], parts)


def test_difference_is_named():
    planned = [Planned("all-reduce", ("y",), 160, 3), Planned("all-gather", ("y",), 128, 1)]
    with pytest.raises(VerifyError) as caught:
        verify_text([*planned, Planned("all-to-all", ("y", "x"), 1024, 2)], TEXT, MESH)
    assert str(caught.value).splitlines() == [
        "the compiled program does not communicate as planned (per device and step)",
        "  collective  axes  planned  compiled  planned bytes  compiled bytes",
        "  all-reduce  y           3         1            480             160    differs by -320",
        "  all-to-all  x,y         2         0          2,048               0  differs by -2,048",
        "1 other rows agree; the compiled text is sharded.lower(*args).compile().as_text()",
    ]


def test_one_byte_is_a_difference():
    assert equal([Planned("all-gather", ("y",), 8, 2)], [compiled("all-gather", ("y",), 16)])
    assert not equal([Planned("all-gather", ("y",), 9, 2)], [compiled("all-gather", ("y",), 16)])


def test_a_collective_nobody_planned():
    assert not equal([], [compiled("all-gather", None, 16)])
    assert "groups of 2" in str(compare([], [compiled("all-gather", None, 16)], MESH))


def test_rounded_plan():
    assert equal([Planned("all-reduce", ("x",), 2, 3)], [compiled("all-reduce", ("x",), Fraction(3, 2), 3)])
    assert not equal([Planned("all-reduce", ("x",), 3, 3)], [compiled("all-reduce", ("x",), Fraction(3, 2), 3)])


def test_all_reduce_in_two_halves():
    halves = [compiled("reduce-scatter", ("x",), 50), compiled("all-gather", ("x",), 70)]
    report = compare([Planned("all-reduce", ("x",), 100, 1), Planned("all-gather", ("x",), 20, 1)], halves, MESH)
    assert report.equal
    assert "note: all-reduce over x was compiled as reduce-scatter and all-gather" in str(report)


def test_unknown_trips_compare_one_trip():
    assert equal([Planned("all-reduce", ("x",), 8, 10)], [compiled("all-reduce", ("x",), 8, 1, known=False)])
    assert not equal([Planned("all-reduce", ("x",), 8, 10)], [compiled("all-reduce", ("x",), 9, 1, known=False)])
