"""Which object a thing is, as a number: another one for every object that there is.

``id`` says so too, but from Python 3.12 on it first tells all audit hooks, and a library that hears them (filelock
does, which JAX imports where it is installed) makes it ten times as slow. A plan of a large step asks a million times.
"""

identity = object.__hash__  # CPython makes it of the address alone
