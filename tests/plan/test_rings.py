"""Which products run in rings: where that pays, where it is demanded, and what plans and their files say of it."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshdsl as md
from meshdsl.errors import ArgumentError
from meshdsl.ir.solution import Ring
from meshdsl.layouts.topology import Link, Topology

FAST = Topology("fast", 1e12, 1e12, 1e12, 1e10, 1e-6, (Link(1e-6, 1e9),), half_side=32.0)
MESH = md.Mesh(model=4, topology=FAST)
PINS = {"x": "model=S(0)", "w": "model=S(1)"}


def gathered(x, w):
    return md.constrain(md.constrain(x, "model=B") @ w, "model=S(1)")


def kept(x, w):
    whole = md.constrain(x, "model=B")
    return md.constrain(whole @ w, "model=S(1)"), jnp.sum(jnp.tanh(whole), 1)


def shapes(rows, width=1024):
    return jax.ShapeDtypeStruct((rows, width), np.float32), jax.ShapeDtypeStruct((width, 2 * width), np.float32)


def planned(step=gathered, rows=4096, mesh=MESH, overlap="full", **more):
    return md.parallelize(step, mesh, PINS, overlap=overlap, **more).plan(*shapes(rows))


def rings(plan):
    return [c.ring for c in plan.collectives if c.ring]


def test_a_ring_takes_as_long_as_the_slower_of_hops_and_parts_and_one_part():
    for rows in (512, 4096, 16384):
        plan = planned(rows=rows, overlap=md.Overlap("prefetch", rings="*"))
        (hop,) = plan.collectives
        assert hop.trips == 3 and hop.bytes == rows // 4 * 1024 * 4 and hop.seconds == 1e-6 + hop.bytes / 1e9
        part = sum(span.seconds for span in plan.spans if span.name == "dot_general") / 4
        flops = 2 * rows // 4 * 1024 * 512 / 1e12
        zeros = rows // 4 * 512 * 4 / 1e12
        assert part == pytest.approx(flops * (1 + 32 / (rows // 4)) * (1 + 32 / 1024) * (1 + 32 / 512) + 1e-6 + zeros)
        assert plan.simulated_seconds == pytest.approx(3 * max(hop.seconds, part) + part)
        assert plan.seconds == pytest.approx(3 * hop.seconds + 4 * part)


def test_rings_are_chosen_where_devices_can_and_they_pay():
    alone, ring = planned(overlap="prefetch"), planned()
    assert not rings(alone) and rings(ring) == ["all-gather"] and not rings(planned(rows=16))
    assert ring.simulated_seconds < alone.simulated_seconds and ring.bytes == alone.bytes
    assert ring.collectives[0].reason.startswith("ring beside 4 parts of a product: x model=S(0) -> model=B, specified")
    assert "all-gather ring" in str(ring)
    synchronous = replace(FAST, asynchronous=("all-gather",))
    assert not rings(planned(mesh=md.Mesh(model=4, topology=synchronous)))


def test_what_is_said_of_single_products_holds():
    line = next(c.source for c in planned().collectives)
    for said, found in (
        ({"x": False}, []),
        ({line: False}, []),
        ({"*": False, "x": True}, ["all-gather"]),
        ({"x": True, "test_rings.py:*": False}, []),
        ((), []),
        ("x", ["all-gather"]),
        ([line], ["all-gather"]),
    ):
        assert rings(planned(overlap=md.Overlap("full", rings=said))) == found, said


def test_demanded_rings_say_what_they_cost():
    small = planned(rows=16, overlap=md.Overlap("full", rings="*"))
    assert rings(small) == ["all-gather"]
    ring = "the ring demanded for the all-gather of x (test_rings.py:21) takes 169 us per step, 63.2 us more than"
    assert small.notes[-1] == f"{ring} sending and computing one after the other"
    cpu = planned(mesh="model=4", overlap=md.Overlap("prefetch", rings="*"))
    assert rings(cpu) and any("rings hide nothing on cpu" in note for note in cpu.notes)
    assert cpu.simulated_seconds == pytest.approx(cpu.seconds)


def test_what_cannot_be_said_is_refused():
    with pytest.raises(
        ArgumentError, match=r"overlap: no ring is possible at 'y' in gathered; .*: test_rings.py:21, x"
    ):
        planned(overlap=md.Overlap("full", rings={"y": False}))
    with pytest.raises(ArgumentError, match="rings: mode 'off' has no rings"):
        md.Overlap("off", rings="*")
    with pytest.raises(
        ArgumentError, match=r"rings: 3 is an int, not a glob.*\n.*rings: 1 for '\*' is neither True nor"
    ):
        md.Overlap("full", rings={3: True, "*": 1})
    need = planned(kept, overlap=md.Overlap("full", rings=())).memory
    with pytest.raises(
        md.MemoryLimitError, match=r"overlap: the rings do not fit: .*\ndemand fewer rings, or raise mem"
    ):
        planned(kept, overlap=md.Overlap("full", rings="*"), memory=need)
    assert not rings(planned(kept, memory=need)), "a ring that does not fit is not chosen"


def test_a_file_holds_rings_and_one_that_is_not_possible_is_refused(tmp_path):
    plan = planned()
    plan.save(tmp_path / "plan.json")
    loaded = md.load_plan(tmp_path / "plan.json")
    assert loaded == plan and rings(loaded) and loaded.solution.rings == plan.solution.rings
    (ring,) = plan.solution.rings
    for wrong in (replace(ring, products=(0,)), Ring(ring.value + 1, ring.layout, ring.products)):
        other = replace(plan, solution=replace(plan.solution, rings=(wrong,)))
        with pytest.raises(md.PlanFileError, match=r"rings\[0\]: products .* do not run beside a ring of"):
            md.parallelize(gathered, MESH, PINS, plan=other).plan(*shapes(4096))
    damaged = (tmp_path / "plan.json").read_text().replace('"rings":[\n[0,', '"rings":[\n[7,')
    (tmp_path / "damaged.json").write_text(damaged)
    with pytest.raises(md.PlanFileError, match=r"rings\[0\]: no move 7"):
        md.load_plan(tmp_path / "damaged.json")
