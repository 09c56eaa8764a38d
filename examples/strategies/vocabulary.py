"""Cross-entropy over a split vocabulary: logits are never gathered; the maxima and the sums are reduced.

Shoeybi et al., Megatron-LM, 2019, section 3: communication of the size of the tokens t, not of tokens times
vocabulary. The gradient of the hidden states is one all-reduce, as for any column-parallel layer.
"""

import jax
import jax.numpy as jnp

import meshdsl as md
from meshdsl.layouts.topology import Link

TOKENS, EMBED, WORDS = 64, 64, 1024


def loss(embed, x, words):
    logits = x @ embed
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - jnp.take_along_axis(logits, words[:, None], axis=1)[:, 0])


def step(embed, x, words):
    """Returns the updated table and the gradient for the layers below."""
    gradient, below = jax.grad(loss, argnums=(0, 1))(embed, x, words)
    return embed - 0.1 * gradient, below


embed = jax.ShapeDtypeStruct((EMBED, WORDS), jnp.float32)
x, words = jax.ShapeDtypeStruct((TOKENS, EMBED), jnp.float32), jax.ShapeDtypeStruct((TOKENS,), jnp.int32)

links = (Link(latency=1e-3, bandwidth=1e7),)
mesh = md.Mesh(model=4, topology=md.Topology("small", 1e8, 1e8, 1e9, 4e9, 0.0, links))
program = md.Program(step, (embed, x, words), layouts={"embed": "model=S(1)", "x": "model=B", "words": "model=B"})

t = 4 * TOKENS  # bytes of one number per token
sizes = {"t": t, "e": EMBED, "k": 4}
published = {"all-reduce over model": "2 * (2 * t + t * e) * (k - 1) / k"}

if __name__ == "__main__":
    print(md.parallelize(program.step, mesh, program.layouts).plan(*program.args))
