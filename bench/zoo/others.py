"""Recommendation, differential equations, graph networks, probabilistic programs."""

import os

import diffrax
import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import jraph
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoMultivariateNormal

from bench.zoo.case import Case, floats, ids

os.environ["KERAS_BACKEND"] = "jax"  # read when keras is imported


def recommender() -> Case:
    """A deep and cross network (keras_rs): embedding tables, feature crosses and dense layers."""
    import keras
    import keras_rs

    keras.utils.set_random_seed(1)
    sizes = (256, 64, 1024)
    numbers, kinds = keras.Input((8,)), keras.Input((len(sizes),), dtype="int32")
    found = [keras.layers.Embedding(n, 16)(kinds[:, i]) for i, n in enumerate(sizes)]
    start = keras.layers.Concatenate()([keras.layers.Dense(16, activation="relu")(numbers), *found])
    crossed = keras_rs.layers.FeatureCross(projection_dim=16)(start, keras_rs.layers.FeatureCross()(start))
    deep = keras.layers.Dense(64, activation="relu")(start)
    model = keras.Model([numbers, kinds], keras.layers.Dense(1)(keras.layers.Concatenate()([crossed, deep])))
    fixed = [x.value for x in model.non_trainable_variables]

    def loss(params, batch):
        logits, _ = model.stateless_call(params, fixed, [batch["numbers"], batch["kinds"]])
        return optax.sigmoid_binary_cross_entropy(logits[:, 0], batch["clicked"]).mean()

    kinds_seen = jnp.stack([ids(i, n, 64) for i, n in enumerate(sizes)], 1)
    batch = {"numbers": floats(3, 64, 8), "kinds": kinds_seen, "clicked": ids(4, 2, 64).astype(jnp.float32)}
    return Case(loss, [x.value for x in model.trainable_variables], batch, optimizer=optax.adagrad(0.01))


def equation() -> Case:
    """A neural ODE (diffrax), solved with adaptive steps: a data-dependent loop."""
    field = eqx.nn.MLP(4, 4, 32, 2, activation=jnp.tanh, key=jax.random.PRNGKey(1))
    params, static = eqx.partition(field, eqx.is_inexact_array)
    times = jnp.linspace(0.0, 2.0, 5)

    def loss(params, batch):
        field = eqx.combine(params, static)
        term = diffrax.ODETerm(lambda t, y, _: field(y))
        control = diffrax.PIDController(rtol=1e-3, atol=1e-6)

        def path(start):
            saved = diffrax.SaveAt(ts=times)
            options = {"saveat": saved, "stepsize_controller": control, "max_steps": 128}
            return diffrax.diffeqsolve(term, diffrax.Dopri5(), times[0], times[-1], 0.05, start, **options).ys

        return jnp.mean(jnp.abs(jax.vmap(path)(batch["seen"][:, 0]) - batch["seen"]))

    return Case(loss, params, {"seen": floats(0, 16, 5, 4)}, optimizer=optax.adam(1e-2))


def graph() -> Case:
    """An interaction network (jraph): two rounds of messages on a batch of small graphs in one array."""
    graphs, nodes, edges = 16, 128, 512
    own = np.repeat(np.arange(graphs), edges // graphs) * (nodes // graphs)
    ends = [jnp.asarray(own + np.asarray(ids(i, nodes // graphs, edges)), jnp.int32) for i in (0, 1)]
    given = jraph.GraphsTuple(
        nodes=floats(2, nodes, 16),
        edges=floats(3, edges, 8),
        senders=ends[0],
        receivers=ends[1],
        globals=None,
        n_node=jnp.full(graphs, nodes // graphs, jnp.int32),
        n_edge=jnp.full(graphs, edges // graphs, jnp.int32),
    )

    def net(given):
        for _ in range(2):
            update = [jraph.concatenated_args(hk.nets.MLP([32, 16])) for _ in range(2)]
            given = jraph.InteractionNetwork(*update, include_sent_messages_in_node_update=True)(given)
        owner = jnp.repeat(jnp.arange(graphs), given.n_node, total_repeat_length=nodes)
        return hk.Linear(1)(jraph.segment_mean(given.nodes, owner, graphs))

    model = hk.without_apply_rng(hk.transform(net))

    def loss(params, batch):
        return jnp.mean((model.apply(params, batch["graphs"]) - batch["value"]) ** 2)

    return Case(loss, model.init(jax.random.key(1), given), {"graphs": given, "value": floats(4, graphs, 1)})


def inference() -> Case:
    """Bayesian Poisson regression (numpyro): a full-rank normal guide, eight samples of the ELBO."""

    def model(features, counts):
        spread = numpyro.sample("spread", dist.HalfNormal(1.0))
        with numpyro.plate("features", features.shape[1]):
            weights = numpyro.sample("weights", dist.Laplace(0.0, spread))
        with numpyro.plate("seen", features.shape[0]):
            numpyro.sample("counts", dist.Poisson(jnp.exp(features @ weights)), obs=counts)

    guide, bound = AutoMultivariateNormal(model), Trace_ELBO(num_particles=8)
    svi = SVI(model, guide, numpyro.optim.Adam(1e-3), bound)
    batch = {"features": 0.3 * floats(0, 128, 8), "counts": ids(1, 5, 128)}
    state = svi.init(jax.random.PRNGKey(1), **batch)

    def loss(params, batch):
        return bound.loss(jax.random.PRNGKey(2), svi.constrain_fn(params), model, guide, **batch)

    return Case(loss, svi.optim.get_params(state.optim_state), batch)
