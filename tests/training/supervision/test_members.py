"""Who goes on after a fault, by a clock of the test."""

import json

import pytest

from meshdsl.layouts.mesh import Mesh
from meshdsl.training.supervision.members import Members, smaller_meshes


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def members(count, least, wait=10.0):
    clock = Clock()
    return Members(count, least, wait, clock), clock


def never(most):
    pytest.fail("asked for a plan")


def up_to(count):
    return lambda most: min(most, count)


def test_a_process_that_fails_again_before_a_step_is_left_out():
    who, _ = members(4, 2)
    who.stepped()
    assert who.failed(1, never) and who.present == (0, 1, 2, 3)  # all are started again
    assert who.failed(1, up_to(3)) and who.present == (0, 2, 3)
    who.stepped()
    assert who.failed(2, never) and who.failed(3, never)  # another one
    assert who.failed(3, up_to(2)) and who.present == (0, 2)
    assert who.failed(0, never)
    assert not who.failed(0, never)  # fewer are not allowed


def test_a_step_between_two_faults_and_several_processes_fewer():
    who, _ = members(4, 1)
    for _ in range(3):
        who.stepped()
        assert who.failed(3, never)
    assert who.failed(3, up_to(2)) and who.present == (0, 1)  # three do not divide the batch


def test_a_hang_names_no_process():
    who, _ = members(3, 1)
    assert who.failed(None, never) and who.failed(None, up_to(2)) and who.present == (0, 1)


def test_without_fewer_all_are_started_again_as_long_as_restarts_last():
    who, _ = members(2, 2)
    assert all(who.failed(1, never) for _ in range(5)) and who.present == (0, 1)


def test_no_mesh_for_fewer_can_be_planned():
    who, _ = members(3, 2)
    assert who.failed(0, never) and not who.failed(0, up_to(0))


def test_all_are_tried_again_at_growing_intervals():
    who, clock = members(2, 1)
    assert who.failed(1, never) and who.failed(1, up_to(1))
    clock.now = 100.0
    assert not who.may_grow  # nothing was done since
    for wait in (10.0, 20.0, 40.0):
        who.stepped()
        assert who.wait == wait and not who.may_grow
        clock.now += wait
        assert who.may_grow
        who.grow((0, 1))
        assert who.present == (0, 1) and who.is_growing and not who.may_grow
        assert who.failed(0, never) and who.present == (0,) and not who.is_growing
    who.stepped()
    clock.now += 80.0
    who.grow((0, 1))
    who.stepped()
    assert (who.present, who.wait, who.is_growing, who.may_grow) == ((0, 1), 10.0, False, False)


def test_growth_that_fails_is_tried_later_and_later_also_when_it_was_first_tried_at_once():
    who, _ = members(2, 1, wait=0.0)
    assert who.lost({1}, up_to(1))
    for wait in (0.0, 2.0, 4.0):
        assert who.wait == wait
        who.grow((0, 1))
        assert who.failed(1, never) and who.present == (0,)


def test_processes_of_a_machine_that_is_gone_have_no_second_chance():
    who, clock = members(6, 2)
    assert who.lost({2, 3}, up_to(6)) and who.present == (0, 1, 4, 5)
    who.stepped()
    clock.now = 10.0
    who.grow(range(6))
    assert who.lost({2, 3}, up_to(4)) and who.present == (0, 1, 4, 5) and who.wait == 20.0  # it went away again
    assert not who.is_growing and who.lost({2}, never)  # not one of those present
    assert not who.lost({0, 1, 4}, never)


def test_another_supervisor_goes_on():
    who, _ = members(3, 1)
    assert who.failed(2, never) and who.failed(2, up_to(2)) and who.failed(1, never)
    other, _ = members(3, 1)
    other.restore(json.loads(json.dumps(who.memory)))
    assert other.failed(1, up_to(1)) and other.present == (0,)


def test_meshes_of_fewer_processes():
    mesh = Mesh(data=4, model=2)

    def found(count, axis, most, least=1):
        return {n: str(each) for n, each in smaller_meshes(mesh, count, axis, most, least).items()}

    assert found(4, "data", 3) == {3: "data=3,model=2", 2: "data=2,model=2", 1: "data=1,model=2"}
    assert found(4, "data", 2, least=2) == {2: "data=2,model=2"}
    assert found(8, "data", 7) == {6: "data=3,model=2", 4: "data=2,model=2", 2: "data=1,model=2"}
    assert found(2, "model", 1) == {1: "data=4,model=1"}
    assert not found(2, "data", 0)
