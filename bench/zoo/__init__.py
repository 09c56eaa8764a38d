"""The zoo: training losses of other people's libraries, planned, run and compared with the unsharded step.

The models are not ours, and neither are their primitives, loops and calls: what fails here
fails for a user. Each case is a function that returns a :class:`bench.zoo.case.Case`.
"""
