"""Every family of models under every strategy of its own: all are planned at tiny sizes, some are run."""

from functools import cache

import jax
import numpy as np

import meshdsl as md
from meshdsl.api.plan_variants import plan_best_variant
from meshdsl.layouts.topology import Link
from meshdsl.models import dlrm, gpt, llama, mixture, mlp, recurrent, resnet, t5, vit
from meshdsl.pins import UserPins
from meshdsl.planner.limits import EFFORTS
from meshdsl.trace import trace
from tests.models.values import start
from tests.sweeps import swept

# Devices so slow that splitting work pays at a test's sizes: else all would be gathered and computed everywhere.
SLOW = md.Topology("slow", 1e6, 1e6, 1e9, 4e9, 0.0, (Link(1e-6, 1e7),))
MESH = md.Mesh(data=4, model=2, topology=SLOW)

LLAMA = llama.Config(layers=2, embed=16, hidden=32, heads=4, groups=2, head=8, seq=8, vocab=64)
MIXTURE = mixture.Config(*(2, 16, 32, 4, 2, 8, 8, 64), experts=8, choices=2, group=8)
RESNET = resnet.Config((3,), base=8, image=16, classes=4)
CLICKS = dlrm.Config((400, 500, 100), dense=4, embed=8, bottom=(8, 8), top=(16,))
WIDE = dlrm.Config((400, 500, 100), dense=4, embed=8, top=(16, 8), wide=True)

FAMILIES = {
    "mlp": (mlp, lambda rules: mlp.program("features=8 hidden=16 classes=4 layers=3", rules, batch=16)),
    "vit": (vit, lambda rules: vit.program(vit.Config(2, 16, 4, patch=4, image=8, classes=4), rules, batch=8)),
    "resnet": (resnet, lambda rules: resnet.program(RESNET, rules, batch=8)),
    "dlrm": (dlrm, lambda rules: dlrm.program(CLICKS, rules, batch=16)),
    "wide-and-deep": (dlrm, lambda rules: dlrm.program(WIDE, rules, batch=16)),
    "gpt": (gpt, lambda rules: gpt.program(gpt.Config(layers=2, embed=16, heads=4, seq=8, vocab=64), rules, batch=8)),
    "llama": (llama, lambda rules: llama.program(LLAMA, rules, batch=8)),
    "mixture": (mixture, lambda rules: mixture.program(MIXTURE, rules, batch=8)),
    "t5": (t5, lambda rules: t5.program(t5.Config(2, 16, 32, 4, 8, 64), rules, batch=8, source=16, seq=8)),
    "recurrent": (recurrent, lambda rules: recurrent.program(recurrent.Config(2, 16, vocab=64), rules, 8, 8)),
}
PLANNED = [(family, strategy) for family, (module, _) in FAMILIES.items() for strategy in module.RULES]
RUN = [
    ("mlp", "zero"),
    ("resnet", "spatial"),
    ("dlrm", "everywhere"),
    ("wide-and-deep", "tensor"),
    ("gpt", "fsdp+tensor"),
    ("mixture", "expert"),
]


@cache
def traced(family):
    """The step of a family as the planner sees it; rules do not change it."""
    tiny = FAMILIES[family][1]("")
    return trace(tiny.step, tiny.args)


def filled(x):
    """Values for a batch: integers are classes, or words, that all families have."""
    draw = np.random.default_rng(0)
    numbers = draw.normal(size=x.shape) if np.issubdtype(x.dtype, np.floating) else draw.integers(0, 4, x.shape)
    return numbers.astype(x.dtype)


def stated(rules):
    """Every (dim, axis) that the rules speak of."""
    return {(dim, axis) for table in rules.tables.values() for dim, axes in table.items() for axis in axes}


@swept("family, strategy", PLANNED, every=5)
def test_a_plan_splits_what_the_strategy_says(family, strategy):
    rules = md.Rules.of(FAMILIES[family][0].RULES[strategy])
    plan = plan_best_variant(traced(family), MESH, UserPins(rules=rules), limits=EFFORTS["default"]).plan
    split = {(dim, axis) for x in plan.inputs for i, dim in enumerate(x.dims) for axis in x.layout.splitting(i)}
    assert split >= stated(rules)
    assert plan.gap < 0.1


def run(family, strategy):
    """Raise unless the step does what was planned, with the unsharded numbers."""
    module, program = FAMILIES[family]
    tiny = program(module.RULES[strategy])
    sharded = md.parallelize(tiny.step, MESH, rules=tiny.rules)
    args = (*start(tiny), jax.tree.map(filled, tiny.args[-1]))
    assert sharded.plan(*args).collectives
    sharded.verify(*args)
    sharded.check(*args)


@swept(
    "family, strategy",
    RUN,
    left=(("resnet", "spatial"), ("wide-and-deep", "tensor")),
)
def test_a_planned_step_runs_as_planned_with_the_unsharded_numbers(family, strategy):
    run(family, strategy)
