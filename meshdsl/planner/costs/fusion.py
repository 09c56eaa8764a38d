"""Which operations end fusion, and which values are written to memory by a compiler that fuses chains.

A compiler fuses elementwise chains. A value is *materialized* if an operation that cannot be fused produces it or reads
it whole, if it has several consumers, or if it enters or leaves a graph.

    y = exp(x @ w) * 2 ;  z = y @ v     x, w, x @ w, y and v are materialized; exp(...) is not
"""

from meshdsl.ir.graph import Graph, Literal, Op, Value
from meshdsl.ir.index import Flags, graph_index
from meshdsl.rules import RULES
from meshdsl.util.lazy import memoize_by_object

PANEL = 32  # columns that a factorization eliminates per pass over its matrix, LAPACK's block size
PASSES_PER_COLUMN = {  # of decompositions over their matrix; reductions to a band multiply it by one vector per column
    **dict.fromkeys("eig eigh hessenberg schur svd tridiagonal".split(), 1.0),
    **dict.fromkeys("cholesky geqrf geqp3 householder_product lu ormqr qr triangular_solve".split(), 1 / PANEL),
}
FUSION_BARRIERS = frozenset(PASSES_PER_COLUMN) | frozenset(
    "dot_general ragged_dot conv_general_dilated gather sort top_k approx_top_k fft "
    "cholesky_update lu_pivots_to_permutation symmetric_product tridiagonal_solve "
    "cumsum cumprod cummax cummin cumlogsumexp random_bits random_split rng_bit_generator argmax argmin "
    "dynamic_update_slice concatenate roll pad select_and_scatter_add optimization_barrier io_callback ruled "
    "ragged_exchange psum pmax pmin pbroadcast all_gather reduce_scatter all_to_all ragged_all_to_all ppermute".split()
)
PRODUCTS = ("dot_general", "conv_general_dilated")
SLICES_OPERAND = frozenset("gather dynamic_slice slice".split())
READS_PART_OF_OPERAND = SLICES_OPERAND | set("dynamic_update_slice scatter scatter-add scatter_add pad".split())
VIEWS = frozenset(
    "reshape squeeze expand_dims enter_shard_map leave_shard_map".split()
)  # the producer of the operand writes the result directly
IN_PLACE_UPDATES = {
    "dynamic_update_slice": 1,
    "scatter": 2,
}  # the operand that is written


def ends_fusion(name: str) -> bool:
    """Whether operations of this name are not fused with their consumers."""
    return name in FUSION_BARRIERS or name not in RULES or name.startswith(("reduce_", "scatter"))


def materialized(graph: Graph, recompute: bool = False) -> Flags:
    """Returns the mask of the values that are written to memory, in a graph and its bodies.

    Args:
      graph: the program.
      recompute: fusible values are materialized neither for several consumers, each of which recomputes them, nor for
        matrix products, as XLA does on TPU.
    """
    return _materialized(graph, recompute)


@memoize_by_object
def _materialized(graph: Graph, recompute: bool) -> Flags:
    index = graph_index(graph)
    barriers = {name for name in index.op_names if ends_fusion(name)} - {""}
    fuse_operands = {name for name in barriers if name.startswith("reduce_") or (recompute and name in PRODUCTS)}
    found = index.positions_named(barriers | {""})[index.producer]  # results of barriers, and inputs of blocks
    found[index.use_value[index.positions_named(barriers - fuse_operands)[index.use_position]]] = True
    return found if recompute else found | ~index.used_once()


def operands_and_results(op: Op) -> "tuple[Value | Literal, ...]":
    """Returns operands and results in one sequence, as signatures list them."""
    return (*op.inputs, *op.outputs)
