"""Rules of transforms and decompositions of whole matrices: only their batch dims are split.

fft               linear; the transformed dims stay whole
ormqr, *_solve    linear in the right-hand side, whose other dim is one more batch
the others        cholesky, qr, svd, ...: neither linear nor monotone
"""

from meshdsl.ir.graph import Op
from meshdsl.layouts.sharding_rule import Dims, Rule
from meshdsl.rules.registry import rule
from meshdsl.rules.shape import kept, named

# Trailing dims of the first operand that are one problem.
CORE = {
    **dict.fromkeys(
        "cholesky cholesky_update eig eigh geqrf geqp3 hessenberg householder_product lu qr schur svd "
        "symmetric_product tridiagonal".split(),
        2,
    ),
    "lu_pivots_to_permutation": 1,
}


@rule("fft")
def fft(op: Op) -> Rule:
    """Batches of transforms; linear."""
    rank, transformed = len(op.inputs[0].shape), len(op.params["fft_lengths"])
    dims = kept(rank, *range(rank - transformed, rank))
    return Rule((dims,), (dims,), linear=((0,),))


@rule("triangular_solve")
def triangular_solve(op: Op) -> Rule:
    """Solve ``a x = b`` (or ``x a = b``): the columns (rows) of b are independent."""
    rank = len(op.inputs[0].shape)
    solved = rank - 2 if op.params["left_side"] else rank - 1
    dims = kept(rank, solved)
    return Rule((kept(rank, rank - 2, rank - 1), dims), (dims,), linear=((1,),))


@rule("ormqr")
def ormqr(op: Op) -> Rule:
    """``q c`` (or ``c q``) with ``q`` as reflections: the columns (rows) of c are independent."""
    rank = len(op.inputs[0].shape)
    dims = kept(rank, rank - 2 if op.params["left"] else rank - 1)
    whole = kept(rank, rank - 2, rank - 1)
    return Rule((whole, whole[:-1], dims), (dims,), linear=((2,),))


@rule("tridiagonal_solve")
def tridiagonal_solve(op: Op) -> Rule:
    """Three diagonals and a right-hand side, whose columns are independent."""
    rank = len(op.inputs[0].shape)
    solved = kept(rank + 1, rank - 1)
    return Rule((kept(rank, rank - 1),) * 3 + (solved,), (solved,), linear=((3,),))


@rule(*CORE)
def batched(op: Op) -> Rule:
    """Batches of matrices."""
    batch = len(op.inputs[0].shape) - CORE[op.name]
    inputs = tuple(_leading(len(x.shape), batch) for x in op.inputs)
    return Rule(inputs, tuple(_leading(len(x.shape), batch) for x in op.outputs))


def _leading(rank: int, batch: int) -> Dims:
    return named(*(f"d{i}" if i < batch else None for i in range(rank)))
