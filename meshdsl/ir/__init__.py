"""The intermediate representation: a training step as an SSA graph, and the contract of planner and lowering.

graph      values, operations with bodies, programs: the grammar
loops      how operands, body inputs, body outputs and results of a loop correspond
check      the checker of the grammar
index      dense numbering and def-use arrays of a graph
rewrite    substitution, copies and fresh ids for passes
text       deterministic text and fingerprint
solution   ``Pins`` and ``Solution``: all that planner and lowering know of each other
prefetch   loops whose collectives run one iteration ahead or behind
rings      products that run in parts beside the hops of a gather or reduction
"""
