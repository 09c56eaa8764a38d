"""The zoo: training steps of third-party libraries, planned, run and compared with the unsharded step.

Models, primitives, loops and calls are those of the libraries, so a failure here is a failure that users meet. Each
case is a function that returns a :class:`bench.zoo.case.Case`.
"""
