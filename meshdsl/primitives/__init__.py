"""JAX primitives that a user's step binds: identities that carry a fact for the planner.

constrain   the layout of a value; the primitive behind ``md.constrain``
iterations  ``md.expect_iterations``: how often a loop runs whose iterations depend on data
stage       ``md.stage``: where the stages of a pipeline are cut
"""
