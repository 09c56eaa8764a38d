"""Every mesh of so many devices, planned and ranked."""

import jax
import jax.numpy as jnp
import pytest

import meshdsl as md

SHAPES = (jax.ShapeDtypeStruct((64, 256), jnp.float32), jax.ShapeDtypeStruct((512, 64), jnp.float32))


def step(w, x):
    return w - jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w), jnp.mean(x)


def test_every_mesh_is_planned_and_the_fastest_is_first():
    program = md.Program(step, SHAPES, layouts={"x": "data=S(0)"})
    said = []
    found = md.search(program, devices=8, topology="dgx-h100", progress=said.append)
    assert {str(each.mesh) for each in found.candidates} == {f"data={n},model={8 // n}" for n in (1, 2, 4, 8)}
    seconds = [each.seconds for each in found.candidates]
    assert seconds == sorted(seconds) and found.best.seconds == seconds[0]
    assert len(said) == 4 and said[0] == "1 of 4: data=1,model=8"
    for each in found.candidates:
        alone = md.parallelize(step, each.mesh, {"x": "data=S(0)"}, donate_argnums=0).plan(*SHAPES)
        assert (alone.seconds, alone.bytes) == (each.plan.seconds, each.plan.bytes)
    assert len(str(found).splitlines()) == 5


def test_a_function_with_its_arguments_in_microbatches():
    found = md.search(step, *SHAPES, devices=4, axes=("data",), layouts={"x": "data=S(0)"}, microbatches=(1, 4, 3))
    counts = {each.microbatches: each for each in found.candidates}
    assert counts[4].plan.memory < counts[1].plan.memory
    assert counts[3].plan is None and "microbatches" in counts[3].fault
    assert str(found).splitlines()[-1].endswith(counts[3].fault[-20:])


def test_none_fits():
    found = md.search(step, *SHAPES, devices=2, memory="10kB")
    assert all(each.plan is None for each in found.candidates)
    with pytest.raises(md.MeshDSLError, match="no candidate can be planned"):
        _ = found.best


@pytest.mark.parametrize(
    "options, said",
    [
        ({"devices": 0}, "devices: "),
        ({"devices": 4, "axes": "data"}, "axes: 'data'"),
        ({"devices": 4, "axes": ("a", "a")}, "axes: "),
        ({"devices": 4, "microbatches": 2}, "microbatches: 2"),
        ({"devices": 4, "microbatches": (0,)}, "microbatches: "),
    ],
)
def test_bad_input(options, said):
    with pytest.raises(md.MeshDSLError, match=said):
        md.search(step, *SHAPES, **options)
    with pytest.raises(md.MeshDSLError, match="beside a program"):
        md.search(md.Program(step, SHAPES), *SHAPES, devices=2)
