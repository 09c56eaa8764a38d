"""Compiled programs run on simulated devices, to compare them with the step that they were compiled from.

numbers        floats as elements of a prime field (random interpretation), or as float64
operation      an instruction, read: types, attributes, constants
interpreter    control flow and calls, on all devices at once
pointwise, shaping, contraction, windows, indexing, exchange
               the operations; the last are collectives and the ends of a ``jax.shard_map``
sharding       which block of an array each device has
comparison     the program before and after the partitioner, on the same random inputs
types          what values are, observed: S(dim), B or P per mesh axis
faults         the operation that makes a result wrong
check          the report on a compiled program
"""
