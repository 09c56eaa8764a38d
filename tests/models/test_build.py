"""Models by name: shapes only, as many parameters as the papers say, and rules that speak of dims that there are."""

import math

import jax
import pytest

import meshdsl as md
from meshdsl import models
from meshdsl.errors import ArgumentError
from meshdsl.models import dlrm, gpt, llama, mixture, recurrent, resnet, t5, vit
from tests.sweeps import swept

PARAMETERS = {
    "gpt2-124m": 124.4e6,
    "gpt2-1.5b": 1.558e9,
    "gpt3-13b": 12.9e9,
    "gpt3-175b": 174.6e9,
    "llama3-8b": 8.03e9,
    "llama3-70b": 70.6e9,
    "llama3-405b": 405.9e9,
    "mixtral-8x7b": 46.7e9,
    "deepseek-moe-16b": 16.88e9,  # 16.4e9 with a dense first layer
    "mamba-130m": 129.1e6,
    "mamba-2.8b": 2.768e9,
    "t5-small": 60.5e6,
    "t5-11b": 11.3e9,
    "vit-b": 86.6e6,
    "vit-h": 632.0e6,
    "resnet50": 25.56e6,
    "wide-resnet50-2": 68.88e6,
    "dlrm": 540.6e6,
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_model_has_as_many_parameters_as_its_paper_says(name):
    program = models.build(name, batch=8)
    assert all(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(program.args))
    count = sum(math.prod(x.shape) for x in jax.tree.leaves(program.args[0]))
    assert count == pytest.approx(PARAMETERS[name], rel=0.005)


FAMILIES = [
    (dlrm, "dlrm"),
    (gpt, "gpt2-124m"),
    (llama, "llama3-8b"),
    (mixture, "switch-base"),
    (recurrent, "mamba-130m"),
    (resnet, "resnet50"),
    (t5, "t5-small"),
    (vit, "vit-b"),
]


@swept("module, name", FAMILIES, left=((resnet, "resnet50"),))
def test_rules_speak_of_dims_that_there_are(module, name):
    for strategy in module.RULES:
        program = models.build(name, strategy)
        leaves = jax.tree.leaves(program.args, is_leaf=lambda x: isinstance(x, md.NamedArray))
        known = {dim for x in leaves if isinstance(x, md.NamedArray) for dim in x.dims}
        assert known >= {dim for table in md.Rules.of(program.rules).tables.values() for dim in table}


@pytest.mark.parametrize("name", [name for _, name in FAMILIES])
def test_init_makes_what_the_step_replaces(name):
    program = models.build(name)
    made, stated = jax.eval_shape(program.init), program.args[:-1]
    assert jax.tree.structure(made) == jax.tree.structure(stated)
    assert jax.tree.leaves(made) == jax.tree.leaves(stated)


def test_names_that_there_are_not():
    with pytest.raises(ArgumentError, match="no model 'gpt2-124'; did you mean 'gpt2-124m'"):
        models.build("gpt2-124")
    with pytest.raises(ArgumentError, match="gpt2-124m has no strategy 'fdsp'; did you mean 'fsdp'"):
        models.build("gpt2-124m", "fdsp")
