"""Predicted memory of a plan: XLA's buffer assignment, imitated on the program before it is compiled.

What XLA allocates is decided by fusion, live ranges and in-place reuse. The first and the rules of the last are equal
for all plans of a program, and are worked out once; a plan adds the copies that its reshards make, and all sizes.

Modules, in order:

* ``aliasing``: which values have memory, and which may share it (``CanShareOperandBufferWithUser``).
* ``timeline``: the program as arrays, and the copies of its values under a choice of layouts.
* ``peak``: ``Liveness``, the live bytes at every program point, and the peak.
* ``aliasing_kernels``, ``liveness_kernels``: the loops over positions, compiled with numba.

Entry points: ``copy_timeline(graph, mesh, own, uses, trees)``, and ``Liveness(...).peak()``.
"""
