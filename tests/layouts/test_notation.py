import copy
import pickle
from dataclasses import replace

import pytest

from meshdsl.errors import LayoutError, MeshDSLError, NotationError
from meshdsl.layouts import B, Layout, Mesh, P, S, topology


def test_text_and_repr_round_trip():
    layout = Layout(data=S(0), model=P, pipe=B, x=P("max"), y=S("hidden"))
    assert str(layout) == "data=S(0) model=P pipe=B x=P(max) y=S(hidden)"
    assert Layout.parse(str(layout)) == layout
    assert eval(repr(layout)) == layout  # repr is code
    assert Layout.parse("data=S(0), model=P") == Layout(data=S(0), model=P)
    assert Layout.parse("") == Layout()


def test_placements_are_interned_values():
    assert S(1) is S(1)
    assert P("sum") is P
    assert pickle.loads(pickle.dumps(P("max"))) is P("max")
    assert copy.deepcopy(B) is B
    with pytest.raises(AttributeError, match="is a value"):
        S(1).dim = 2


def test_order_matters_only_among_axes_of_one_dim():
    assert Layout.parse("x=S(1) y=S(1)") != Layout.parse("y=S(1) x=S(1)")
    assert Layout.parse("x=S(0) y=S(1)") == Layout.parse("y=S(1) x=S(0)")
    assert Layout.parse("y=S(1) x=S(1)").splitting(1) == ("y", "x")


def test_local_shape_and_shards():
    sizes = {"data": 4, "model": 2}
    assert Layout.parse("data=S(0) model=S(0)").local_shape((16, 3), sizes) == (2, 3)
    assert Layout.parse("data=P model=S(1)").local_shape((16, 4), sizes) == (16, 2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("data=Q(0)", "a placement is S(dim), B, P, P(max) or P(min), not 'Q(0)'\n  data=Q(0)\n       ^"),
        ("data S(0)", "'=' was expected after axis 'data', as in 'data=S(0) model=P'\n  data S(0)\n      ^"),
        ("data=S", "S needs the dim it splits, as in S(0) or S(batch)\n  data=S\n       ^"),
        ("data=S(0", "')' was expected\n  data=S(0\n          ^"),
        ("data=B data=B", "axis 'data' is named twice\n  data=B data=B\n         ^"),
        ("data=P(mux)", "no reduction 'mux'; did you mean 'max'?\n  data=P(mux)\n         ^"),
    ],
)
def test_layout_errors_point_at_the_fault(text, message):
    with pytest.raises(NotationError) as error:
        Layout.parse(text)
    assert str(error.value) == message


def test_mesh_text_and_errors():
    mesh = Mesh.parse("data=4,model=2")
    assert mesh == Mesh(data=4, model=2)
    assert (str(mesh), repr(mesh), mesh.size) == ("data=4,model=2", "Mesh(data=4, model=2)", 8)
    with pytest.raises(NotationError) as error:
        Mesh.parse("data=4,model=x")
    assert str(error.value) == "a size is a whole number >= 1\n  data=4,model=x\n               ^"
    with pytest.raises(LayoutError, match="no axis 'modle' in mesh data=4,model=2; did you mean 'model'"):
        mesh.axis("modle")
    with pytest.raises(NotationError, match=r"topolgy='cpu': a size is a whole number >= 1; did you mean 'topology'\?"):
        Mesh(data=4, topolgy="cpu")
    with pytest.raises(NotationError, match=r"data=0: a size is a whole number >= 1$"):
        Mesh(data=0)
    with pytest.raises(MeshDSLError, match="no topology 'cpus'; did you mean 'cpu'"):
        Mesh(data=2, topology="cpus")


def test_meshes_that_do_not_fit_the_links():
    said = "model=6: groups of 6 devices do not divide the 8 that a link of topology dgx-h100 joins, nor hold several"
    with pytest.raises(LayoutError, match=said) as error:
        Mesh(data=4, model=6, topology="dgx-h100")
    assert "\n" not in str(error.value)
    assert str(error.value).endswith("whole; nearest sizes that work: model=4, model=8")
    with pytest.raises(LayoutError, match=r"a=3: groups of 12 devices .* work: a=2, a=4"):
        Mesh(data=2, a=3, b=4, topology="dgx-h100")
    for sizes in ({"model": 6}, {"data": 3, "model": 4}, {"data": 5, "model": 8}, {"data": 2, "model": 24}):
        Mesh(topology="dgx-h100", **sizes)
    node = replace(topology("dgx-h100"), name="node", links=topology("dgx-h100").links[:1])
    with pytest.raises(LayoutError, match="a mesh of 16 devices: topology node joins 8"):
        Mesh(data=16, topology=node)


def test_the_last_mesh_axis_takes_the_fastest_link():
    dgx = topology("dgx-h100")
    links = Mesh(data=4, model=8, topology=dgx).topology.axis_links([("data", 4), ("model", 8)])
    assert links["model"].bandwidth > links["data"].bandwidth
    crossing = dgx.axis_links([("data", 2), ("model", 16)])
    assert crossing["data"] == links["data"] and crossing["model"].bandwidth == links["data"].bandwidth


def test_a_memory_needs_no_space_before_it():
    assert str(Layout.parse("data=S(0)@host")) == "data=S(0) @host"
