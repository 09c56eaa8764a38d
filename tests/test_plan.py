"""Plan: what it says, what a diff shows, and what fits a program."""

import re
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshdsl as md
from meshdsl.errors import BudgetError, LayoutError, PlanFileError
from meshdsl.ir.check import check_graph
from meshdsl.ir.graph import Graph, Op, TracedProgram, Value
from meshdsl.ir.solution import Solution
from meshdsl.ir.text import fingerprint
from meshdsl.layouts import Layout, Mesh
from meshdsl.layouts.placement import B, P, S
from meshdsl.layouts.reshard import ReshardStep, complete, reshard
from meshdsl.layouts.topology import load_topology, save_topology
from meshdsl.pins import make_pins
from meshdsl.plan import build_plan, load_plan
from meshdsl.plan.validate import check_same_program
from tests.programs import F32, MESH, TOPOLOGY, leaf, line, small_plan, small_program, small_solution

SAVED = Path(__file__).parent / "golden" / "saved"  # files that an earlier version wrote


def test_printed_plan(golden):
    golden("small_plan.txt", str(small_plan()) + "\n")


def test_plan_file(golden, tmp_path):
    replace(small_plan(), jax="").save(tmp_path / "p.json")
    golden("small_plan.json", (tmp_path / "p.json").read_text())


def test_figures():
    plan = small_plan()
    assert plan.bytes == 384 + 6
    assert (plan.seconds, plan.lower_bound, plan.memory) == (2e-3, 1.9e-3, 1234)
    assert plan.gap == pytest.approx(0.05)
    near = replace(plan, solution=replace(plan.solution, lower_bound=plan.seconds * (1 - 4e-4)))
    proved = replace(plan, solution=replace(plan.solution, lower_bound=plan.seconds * (1 - 2e-9)))
    assert "gap 0.04%)" in str(near) and "gap 0%)" in str(proved)
    assert plan.mesh == MESH
    assert plan.topology.name == "test"


def test_layouts_by_path():
    plan = small_plan()
    assert plan.layout("w") == Layout.parse("data=S(1) model=B")
    assert plan.output_layout("0") == Layout.parse("data=S(1) model=B")
    with pytest.raises(LayoutError, match=r"no input 'batch/y' in the plan; did you mean 'batch/x'\?"):
        plan.layout("batch/y")
    with pytest.raises(LayoutError, match="no output '7' in the plan; known: 0, 1"):
        plan.output_layout("7")


def test_a_gather_belongs_to_its_reader_and_a_reduction_to_its_maker():
    gather, reduction = small_plan().collectives
    assert (gather.kind, gather.axes, gather.bytes, gather.trips) == ("all-gather", ("data",), 384, 1)
    assert (gather.phase, gather.source, gather.value) == ("forward", "model.py:31", "w")
    assert gather.reason == "w data=S(1) -> data=B, needed by dot_general (model.py:31)"
    assert (reduction.kind, reduction.source, reduction.shape, reduction.dtype) == (
        "all-reduce",
        "model.py:32",
        (),
        "float32",
    )
    assert reduction.reason == (
        "partial sum of reduce_sum (model.py:32) data=P -> data=B, needed by unheard_of (model.py:33)"
    )


def test_operations_without_a_rule_are_noted():
    assert "replicated: no rule for unheard_of at model.py:33" in small_plan().notes


def loop_plan(estimated=False):
    """A scan over 6 layers whose body gathers its slice; the carry is reduced at the end of the body."""
    ws, x, y = Value(0, (6, 8, 8), F32), Value(1, (4, 8), F32), Value(2, (4, 8), F32)
    c, w, z = Value(10, (4, 8), F32), Value(11, (8, 8), F32), Value(12, (4, 8), F32)
    inner = (Op(20, "dot_general", None, {}, (c, w), (z,), line(5)), Op(21, "return", None, {}, (z,), ()))
    body = Graph((c, w), inner, trips=6, estimated=estimated)
    params = {"num_consts": 0, "num_carry": 1, "length": 6, "reverse": False}
    scan = Op(0, "scan", None, params, (x, ws), (y,), line(4), bodies=(body,))
    last = Op(1, "return", None, {}, (y,), ())
    program = TracedProgram(
        Graph((ws, x), (scan, last)), (leaf("params/layers/w", 6, 8, 8), leaf("x", 4, 8)), (leaf("", 4, 8),)
    )
    check_graph(program.graph)
    whole, split, part = (complete(Layout.parse(t), MESH) for t in ("", "data=S(0)", "data=P"))
    solution = Solution(
        mesh=MESH,
        rows={},
        layouts={0: complete(Layout.parse("data=S(1)"), MESH), 1: whole, 2: whole, 10: whole, 11: split, 12: part},
        uses={
            (0, 0): whole,
            (0, 1): complete(Layout.parse("data=S(1)"), MESH),
            (1, 0): whole,
            (20, 0): whole,
            (20, 1): whole,
            (21, 0): whole,
        },
        trees={11: reshard(split, whole, (8, 8), 4, MESH), 12: reshard(part, whole, (4, 8), 4, MESH)},
        seconds=1.0,
        lower_bound=1.0,
        peak=0,
        peak_op=-1,
    )
    return build_plan(program, solution, make_pins(program, MESH))


def test_collectives_in_loops_have_trips_and_names():
    gather, reduction = loop_plan().collectives
    assert (gather.trips, gather.bytes, gather.value) == (6, 192, "params/layers/w[i]")
    assert gather.reason == "params/layers/w[i] data=S(0) -> data=B, needed by dot_general (model.py:5)"
    assert reduction.reason == "partial sum of dot_general (model.py:5) data=P -> data=B, returned by the loop's body"
    assert loop_plan().bytes == 6 * (192 + 192)


def test_collectives_are_in_the_order_of_the_operations_that_wait_for_them():
    def step(xs, late):
        def body(total, x):
            return md.constrain(md.constrain(total * x, "data=S(0) model=B"), "data=B model=B"), None

        total, _ = jax.lax.scan(body, jnp.ones(64), xs)
        return total * md.constrain(late, "data=B model=B")

    pins = {"xs": "data=B model=B", "late": "data=S(0) model=B"}
    plan = md.parallelize(step, MESH, pins).plan(np.ones((6, 64), np.float32), np.ones(64, np.float32))
    assert [(c.kind, c.trips) for c in plan.collectives] == [("all-gather", 6), ("all-gather", 1)]


def test_estimated_trips_are_marked_in_print():
    assert " ~6 " in str(loop_plan(estimated=True))
    assert "~" not in str(loop_plan())


def test_a_move_of_what_is_returned_belongs_to_its_maker():
    program, solution = small_program(), small_solution()
    cols, whole = complete(Layout.parse("data=S(1)"), MESH), complete(Layout(), MESH)
    trees = {**solution.trees, 4: reshard(cols, whole, (8, 16), 4, MESH)}
    layouts, uses = {**solution.layouts, 4: cols}, {**solution.uses, (3, 0): whole}
    plan = build_plan(program, replace(solution, layouts=layouts, uses=uses, trees=trees), make_pins(program, MESH))
    last = plan.collectives[-1]
    assert (last.source, last.phase) == ("model.py:33", "optimizer")
    assert last.reason == "result of unheard_of (model.py:33) data=S(1) -> data=B, returned by the step"


def test_a_move_through_two_steps_names_the_last_reader():
    program, solution = small_program(), small_solution()
    whole, half = complete(Layout(), MESH), complete(Layout.parse("data=S(0)"), MESH)
    part = solution.layouts[3]
    value = program.graph.ops[0].outputs[0]
    moves = (
        ReshardStep("reduce-scatter", ("data",), P, S(0), part, half, 8, 1.0),
        ReshardStep("all-gather", ("data",), S(0), B, half, whole, 8, 1.0),
    )
    uses = {**solution.uses, (1, 0): whole}
    trees = {**solution.trees, value.id: moves}
    plan = build_plan(
        program,
        replace(solution, layouts={**solution.layouts, 2: part}, uses=uses, trees=trees),
        make_pins(program, MESH),
    )
    assert [c.reason for c in plan.collectives[1:3]] == [
        "partial sum of dot_general (model.py:31) data=P -> data=S(0), needed by reduce_sum (model.py:32)",
        "result of dot_general (model.py:31) data=S(0) -> data=B, needed by reduce_sum (model.py:32)",
    ]


def test_diff_of_equal_plans_is_empty():
    diff = small_plan().diff(small_plan())
    assert not diff
    assert str(diff) == "the plans are equal"


def test_diff_shows_layouts_collectives_and_totals(golden):
    plan = small_plan()
    arrays = (replace(plan.inputs[0], layout=Layout.parse("data=S(0) model=S(1)")), plan.inputs[1])
    grown = replace(plan.collectives[1], bytes=60)
    other = replace(plan, inputs=arrays, collectives=(grown,), solution=replace(plan.solution, seconds=4e-3))
    diff = plan.diff(other)
    assert diff
    assert diff.layouts == (("w", "float32[8,16] data=S(1)", "float32[8,16] data=S(0) model=S(1)"),)
    golden("small_diff.txt", str(diff) + "\n")


def test_diff_knows_no_lines_and_says_what_got_worse():
    plan = small_plan()
    moved = [
        replace(c, source="other.py:7", reason=c.reason.replace("model.py:3", "other.py:9")) for c in plan.collectives
    ]
    assert moved[0].reason != plan.collectives[0].reason
    assert not plan.diff(replace(plan, collectives=tuple(moved)))
    slower = plan.diff(replace(plan, solution=replace(plan.solution, seconds=3e-3, peak=plan.memory // 2)))
    assert str(slower).startswith("worse: predicted step time +50%; better: peak memory per device -50%\n")
    assert slower.changes == {"seconds": 0.5, "memory": -0.5}


def test_outputs_that_lie_as_their_inputs_are_not_told_twice():
    plan = small_plan()
    array = replace(plan.inputs[0], layout=Layout.parse("data=B model=B"))
    followed = replace(array, path="0", follows=array.path)
    one = replace(plan, inputs=(array, plan.inputs[1]), outputs=(followed,))
    other = [replace(each, layout=Layout.parse("data=S(0) model=B")) for each in (array, followed)]
    diff = one.diff(replace(one, inputs=(other[0], plan.inputs[1]), outputs=(other[1],)))
    assert [name for name, *_ in diff.layouts] == ["w"]


def test_diff_of_other_meshes():
    other = build_plan(
        small_program(), small_solution(Mesh(topology=TOPOLOGY, data=8, model=2)), make_pins(small_program(), MESH)
    )
    assert small_plan().diff(other).made_for == (("mesh", "data=4,model=2", "data=8,model=2"),)


def test_a_budget_that_is_kept():
    small_plan().assert_at_most(bytes=390, kinds={"all-gather": 1, "all-reduce": 1})
    small_plan().assert_at_most(kinds=("all-gather", "all-reduce"))


def test_a_budget_that_is_exceeded():
    with pytest.raises(BudgetError) as caught:
        small_plan().assert_at_most(bytes=100, kinds={"all-reduce": 1})
    assert isinstance(caught.value, AssertionError)
    assert str(caught.value) == (
        "the plan of step on data=4,model=2 exceeds its budget:\n"
        "  bytes: 390 per device and step, at most 100 allowed\n"
        "  all-gather: runs 1 times per step, at most 0 allowed"
    )
    with pytest.raises(BudgetError):
        small_plan().assert_at_most(kinds=("all-gather",))


def test_the_fingerprint_ignores_lines_and_array_contents():
    moved = small_program()
    for op in moved.graph.ops:
        op.source = line(1000)
        op.params = {"value": np.ones(3)}
    other = small_program()
    for op in other.graph.ops:
        op.params = {"value": np.zeros(3)}
    assert fingerprint(moved) == fingerprint(other)
    assert fingerprint(moved) != fingerprint(small_program())


def mismatch(program, mesh=MESH, layouts=None, plan=None):
    with pytest.raises(PlanFileError) as caught:
        check_same_program(plan or small_plan(), program, mesh, make_pins(program, mesh, layouts))
    lines = str(caught.value).splitlines()
    assert lines[0] == "the plan of step does not match this call of step:"
    assert lines[-1] == "plan again without plan= and save the new plan"
    return [text.strip() for text in lines[1:-1]]


def test_a_plan_matches_its_own_program():
    program = small_program()
    check_same_program(small_plan(), program, MESH, make_pins(program, MESH, {"w": "data=S(1)"}))


def test_other_shapes_and_another_mesh():
    program = small_program()
    program.inputs = (program.inputs[0], leaf("batch/z", 64, 8))
    assert mismatch(program, Mesh(topology=TOPOLOGY, data=8)) == [
        "mesh: data=4,model=2 in the plan, data=8 here",
        "input batch/x: float32[32,8] in the plan, absent here",
        "input batch/z: absent in the plan, float32[64,8] here",
    ]


def test_another_program():
    program = small_program()
    program.graph.ops[1].name = "reduce_max"
    assert mismatch(program) == [
        "operations: 0 reduce_max in the plan, 1 here",
        "operations: 1 reduce_sum in the plan, 0 here",
    ]
    program = small_program()
    program.graph.ops[1].params = {"axes": (0, 1)}
    equal = "operations: equal in number to the plan's, with other operands or parameters"
    assert mismatch(program) == [equal]
    traced = f"the plan is of jax 0.9, this is jax {jax.__version__}, which may trace other operations"
    assert mismatch(program, plan=replace(small_plan(), jax="0.9")) == [equal, traced]


def test_other_pins():
    assert mismatch(small_program(), layouts={"w": "data=S(0)"}) == [
        "input w: data=S(1) model=B in the plan, pinned to data=S(0) here"
    ]


def test_a_plan_of_an_earlier_version_equals_the_same_plan_of_today():
    """Its reasons end in other words: ``: add (model.py:8) reads it`` for ``, needed by add (model.py:8)``."""
    plan = small_plan()

    def earlier(reason):
        reason = re.sub(r", needed by (.+)$", r": \1 reads it", reason)
        return re.sub(r", returned by the step$", ": the step returns it", reason)

    collectives = tuple(replace(c, reason=earlier(c.reason)) for c in plan.collectives)
    assert any(old.reason != new.reason for old, new in zip(collectives, plan.collectives, strict=True))
    assert not replace(plan, collectives=collectives).diff(plan)


def test_files_of_an_earlier_version_load_and_name_no_module(tmp_path):
    plan, topology = load_plan(SAVED / "plan.json"), load_topology(SAVED / "topology.toml")
    plan.save(tmp_path / "plan.json")
    save_topology(topology, tmp_path / "topology.toml")
    for name in ("plan.json", "topology.toml"):
        text = (SAVED / name).read_text()
        assert (tmp_path / name).read_text() == text
        assert not re.search(r"\b(meshdsl|layouts|lowering|models)\.\w", text)
    assert (len(plan.collectives), plan.pipeline.ticks, plan.topology.name) == (7, 6, "dgx-h100")
    assert topology.axes[0][0] == "pipe" and topology.pieces == 2
