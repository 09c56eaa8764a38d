"""Graph networks: molecules, a batch of graphs per device."""

from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from bench.programs.adapter import Adapter, Training
from bench.programs.nested import first_call


def _molecules(size: str) -> Training:
    """``update_fn`` of ``train_pmap``: every device has a batch of graphs and counts its own nodes.

    The same arrays are given to any number of devices; edges join the first nodes of each, as many as on eight devices.
    """
    jax.tree_structure, jax.tree_map = jax.tree.structure, jax.tree.map
    jax.device_put_replicated = lambda tree, devices: jax.tree.map(lambda x: jnp.stack([x] * len(devices)), tree)
    import jraph
    from jraph.ogb_examples import train_pmap

    graphs, nodes, edges = (4, 32, 64) if size == "small" else (512, 16384, 32768)  # of one device

    def graph(seed: int) -> Any:
        rng = np.random.default_rng(seed)
        ends = rng.integers(0, nodes, (2, edges), dtype=np.int32)
        return jraph.GraphsTuple(
            nodes=rng.normal(size=(nodes, 9)).astype(np.float32),
            edges=rng.normal(size=(edges, 3)).astype(np.float32),
            senders=ends[0],
            receivers=ends[1],
            n_node=np.full(graphs, nodes // graphs, np.int32),
            n_edge=np.full(graphs, edges // graphs, np.int32),
            globals={"label": rng.integers(0, 2, graphs)},
        )

    class Reader:
        """Random graphs in place of files."""

        def __init__(self, **_: Any) -> None:
            self.seed = 0

        def repeat(self) -> None:
            pass

        def get_graph_by_idx(self, index: int) -> Any:
            return graph(index)

        def __iter__(self) -> Any:
            return (graph(seed) for seed in range(8))

    def whole(per_device: Any) -> Any:
        return jax.tree.map(lambda x: jnp.asarray(x).reshape(-1, *x.shape[2:]), per_device)

    with mock.patch("jraph.ogb_examples.data_utils.DataReader", Reader):
        step, (params, _, _, state) = first_call(
            lambda: train_pmap.train("", "", "", graphs, 1, None), "jax.pmap", "update_fn"
        )

    def batch_of(seed: int) -> Any:
        joined = whole(jax.tree.map(lambda *x: np.stack(x), *(graph(8 * seed + i) for i in range(8))))
        return joined, joined.globals["label"]

    first = jax.tree.map(lambda x: x[0], params), *batch_of(0), jax.tree.map(lambda x: x[0], state)
    return Training(
        step,
        first if size == "small" else jax.eval_shape(lambda: first),
        {"graph/**": 0, "label": 0},
        lambda args, result, seed: (result[3], *batch_of(seed), result[2]),
        "device",
    )


MOLECULES = Adapter(
    "jraph: a graph network (haiku) on molecules, pmap",
    "google-deepmind/jraph",
    "51f5990104f7374492f8f3ea1cbc47feb411c69c",
    _molecules,
    "512 graphs, 16,384 nodes, 32,768 edges per device",
    changed=(
        "`jax.pmap` becomes `md.parallelize`",
        "parameters are not replicated",
        "batches are not stacked by device",
    ),
    aged=("`jax.tree_map` becomes `jax.tree.map`", "`jax.tree_structure` becomes `jax.tree.structure`"),
    stubs=("pandas",),
)
