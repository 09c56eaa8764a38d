"""``md.rule``: a user's function as one operation of the plan, with a sharding rule in einsum notation.

A kernel or a function whose primitives shard badly (an attention written with a custom derivative, a sort-based
dispatch) becomes one operation, as in ``jax.experimental.custom_partitioning`` and Shardy's ``sdy.sharding_rule``. The
rule is data, the placements that it allows are derived from it, and it is checked by running the function.

    notation    the text of a rule, and the rules of derivatives and of ``vmap`` that follow from it
    primitive   the JAX primitive behind it, under jvp, transpose and vmap
    api         ``md.rule`` and the functions that it decorates
    simulate    devices in numpy: cut values into shards and partial sums, put results together again
    validate    a randomised check of a rule on 2 and 3 simulated devices; ``check_rules`` is the stage of planning
"""

from meshdsl.custom_rules.api import FunctionWithRule, RuleText, rule
from meshdsl.custom_rules.validate import check_rules

__all__ = ["FunctionWithRule", "RuleText", "check_rules", "rule"]
