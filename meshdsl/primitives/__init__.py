"""What users say inside a step, for the planner: identities of JAX that carry a fact, functions to choose from, and an
exchange whose lengths are data.

alternatives  ``md.alternatives``: functions with equal results, of which the planner takes one
constrain     the layout of a value; the primitive behind ``md.constrain``
iterations    ``md.expect_iterations``: how often a loop runs whose iterations depend on data
ragged_exchange  ``md.ragged_exchange``: ranks send each other as many rows as the data says
stage         ``md.stage``: where the stages of a pipeline are cut
"""
