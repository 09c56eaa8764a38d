"""Every public name has an example in its docstring. Those that show a result give it; the others name what exists."""

import ast
import doctest
import inspect
import re
from types import ModuleType

import jax
import jax.numpy as jnp

import meshdsl as md
from tests.sweeps import swept

UNDOCUMENTED = ("nd", "DimsLike", "Tensor")  # a package, and aliases of types
SIZES = {"up": (64, 256), "down": (256, 64)}  # of the parameters of the examples' step
NAMES = [name for name in dict.fromkeys((*md.__all__, *md.nd.__all__)) if name not in UNDOCUMENTED]


def step(params, batch):
    """The step of the examples."""

    def loss(params):
        return jnp.mean((jax.nn.relu(batch @ params["up"]) @ params["down"] - batch) ** 2)

    return jax.tree.map(lambda w, g: w - 0.1 * g, params, jax.grad(loss)(params))


def public(name):
    """The class or function of a public name; of a placement, its class."""
    value = getattr(md, name)
    value = getattr(value, name) if isinstance(value, ModuleType) else value  # calibrate is also its module
    return value if inspect.isroutine(value) or inspect.isclass(value) else type(value)


def examples(name):
    """The examples of a public name and of its methods, each with what the docstring says that it prints."""
    finder = doctest.DocTestFinder(exclude_empty=True)
    params, batch = {key: jnp.ones(size) / 64 for key, size in SIZES.items()}, jnp.ones((512, 64))
    given = {"md": md, "jax": jax, "jnp": jnp, "step": step, "params": params, "batch": batch}
    found = finder.find(public(name), name, globs=given)
    return [test for test in found if test.examples]


def test_every_public_name_has_an_example():
    assert len(NAMES) > 100
    assert [name for name in NAMES if not re.search("^Example:$", inspect.getdoc(public(name)) or "", re.M)] == []


@swept("name", NAMES, left=("Frontier",))
def test_examples(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for test in examples(name):
        if any(example.want for example in test.examples):
            told = []
            doctest.DocTestRunner().run(test, out=told.append)
            assert told == []
        for example in test.examples:
            nodes = [node for node in ast.walk(ast.parse(example.source)) if isinstance(node, ast.Attribute)]
            used = [node.attr for node in nodes if isinstance(node.value, ast.Name) and node.value.id == "md"]
            assert [attribute for attribute in used if not hasattr(md, attribute)] == []
