"""JAX primitives that a user's step binds: identities that carry a fact for the planner.

constrain   the layout of a value; the primitive behind ``md.constrain``
stage       ``md.stage``: where the stages of a pipeline are cut
"""
