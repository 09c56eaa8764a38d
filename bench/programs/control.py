"""Reinforcement learning: PPO in one scan, soft actor-critic."""

from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np

from bench.programs.adapter import Adapter, Training

AGED_TFP = "`jax.interpreters.xla.pytype_aval_mappings` is restored for TensorFlow Probability 0.25"


def _name_for_probability() -> None:
    """Restores the name that the last release of TensorFlow Probability expects of jax."""
    from jax._src import core
    from jax.interpreters import xla

    xla.pytype_aval_mappings = core.pytype_aval_mappings


def _ppo(size: str) -> Training:
    """The whole training: initialisation, ten or more rounds of play and updates, in one scan."""
    _name_for_probability()
    import ppo

    envs, steps, updates = (16, 8, 10) if size == "small" else (2048, 128, 100)
    config = {
        "LR": 2.5e-4,
        "NUM_ENVS": envs,
        "NUM_STEPS": steps,
        "TOTAL_TIMESTEPS": envs * steps * updates,
        "UPDATE_EPOCHS": 4,
        "NUM_MINIBATCHES": 4,
        "GAMMA": 0.99,
        "GAE_LAMBDA": 0.95,
        "CLIP_EPS": 0.2,
        "ENT_COEF": 0.01,
        "VF_COEF": 0.5,
        "MAX_GRAD_NORM": 0.5,
        "ACTIVATION": "tanh",
        "ENV_NAME": "CartPole-v1",
        "ANNEAL_LR": True,
    }
    return Training(
        ppo.make_train(config), (jax.random.PRNGKey(30),), {}, lambda args, result, seed: (jax.random.PRNGKey(seed),)
    )


def _sac(size: str) -> Training:
    """One update of critics, target critics, actor and temperature."""
    _name_for_probability()
    jax.tree_multimap, jax.util = jax.tree.map, SimpleNamespace(cache=lambda: cache)
    jnp.DeviceArray = jax.Array
    flax.config.update("flax_return_frozendict", True)
    from jaxrl.agents.sac.sac_learner import SACLearner, _update_jit
    from jaxrl.datasets import Batch

    rows, seen, moved, hidden = (32, 17, 6, (64, 64)) if size == "small" else (65536, 376, 17, (1024, 1024))

    def batch(seed: int) -> Any:
        rng = np.random.default_rng(seed)
        before, after = rng.normal(size=(2, rows, seen)).astype(np.float32)
        actions = np.tanh(rng.normal(size=(rows, moved))).astype(np.float32)
        masks = (rng.random(rows) < 0.9).astype(np.float32)
        return Batch(before, actions, rng.normal(size=rows).astype(np.float32), masks, after)

    def arguments() -> tuple[Any, ...]:
        first = batch(0)
        agent = SACLearner(0, first.observations[:1], first.actions[:1], hidden_dims=hidden)
        models = agent.actor, agent.critic, agent.target_critic, agent.temp
        return agent.rng, *models, first, agent.discount, agent.tau, agent.target_entropy

    first = arguments() if size == "small" else jax.eval_shape(arguments)
    return Training(
        partial(_update_jit, backup_entropy=True, update_target=True),
        first,
        {"batch/**": 0},
        lambda args, result, seed: (*result[:5], batch(seed), *args[6:]),
    )


PPO = Adapter(
    "PPO: environments, agent and optimizer in one scan (flax, distrax, gymnax)",
    "luchris429/purejaxrl",
    "31756b197773a52db763fdbe6d635e4b46522a73",
    _ppo,
    "2048 environments, 128 steps, 100 updates",
    changed=("`jax.jit` becomes `md.parallelize`",),
    aged=(AGED_TFP,),
    folders=("purejaxrl",),
    stubs=("brax", "matplotlib", "navix", "seaborn"),
)

SAC = Adapter(
    "soft actor-critic: three optimizers, vmapped critics, target network (flax, TensorFlow Probability)",
    "ikostrikov/jaxrl",
    "4a9abaff1c915b00ca73d35a30faf16b165e52ec",
    _sac,
    "65,536 transitions of 376 + 17 numbers, 2 layers of 1024",
    changed=("`jax.jit` becomes `md.parallelize`",),
    aged=(
        AGED_TFP,
        "`jax.tree_multimap` becomes `jax.tree.map`",
        "`jax.util.cache()` becomes `functools.cache`",
        "`jnp.DeviceArray` becomes `jax.Array`",
        "flax returns frozen parameters again (`flax_return_frozendict`)",
    ),
    stubs=("d4rl", "dm_control", "dm_env", "gdown", "gym", "matplotlib", "tqdm"),
)
