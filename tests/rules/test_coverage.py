"""No rule without a proof."""

from importlib import import_module
from pathlib import Path

from jax import lax

from meshdsl.ir.manual import BOUNDARY
from meshdsl.rules import RULES
from meshdsl.rules.linalg import CORE
from meshdsl.rules.shard_map import KINDS
from tests.rules.prover import SAMPLES

NEWER = {"log2", "one_minus_square", "polynomial"}  # primitives that jax 0.10 does not have
ALIKE = set(CORE)  # one rule for all decompositions, proved on those whose results are unique
SOUND = {"select_and_scatter_add", "igamma", "igammac"}  # proved right by tests of their own, but not complete
EFFECTS = {"io_callback"}  # returns something else every time; tests of its own
SHARD_MAP = {*BOUNDARY, *KINDS, "axis_index"}  # of a shard_map's body, proved in ``test_shard_map``


def test_every_rule_is_proved():
    for file in sorted(Path(__file__).parent.glob("test_*.py")):
        import_module(f"tests.rules.{file.stem}")
    absent = {name for name in NEWER if not hasattr(lax, name)}
    assert sorted(set(RULES) - set(SAMPLES) - absent - ALIKE - SOUND - EFFECTS - SHARD_MAP) == []
