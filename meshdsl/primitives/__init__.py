"""What users say inside a step, for the planner: identities of JAX that carry a fact, and functions to choose from.

alternatives  ``md.alternatives``: functions with equal results, of which the planner takes one
constrain     the layout of a value; the primitive behind ``md.constrain``
iterations    ``md.expect_iterations``: how often a loop runs whose iterations depend on data
stage         ``md.stage``: where the stages of a pipeline are cut
"""
