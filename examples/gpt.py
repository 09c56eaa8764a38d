"""The GPT of ``make demo`` in flax and optax: held-out loss 4.9 nats per token, where unigram entropy is 6.03."""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import meshdsl as md
from meshdsl.training.datasets import text

VOCABULARY, EMBED, WIDE, HEADS, LAYERS, BATCH, SEQ, STEPS = 2048, 256, 1024, 8, 6, 64, 32, 400


class Block(nnx.Module):
    def __init__(self, rngs):
        heads, small = (HEADS, EMBED // HEADS), nnx.initializers.normal(0.005)
        self.norm1, self.norm2 = (nnx.LayerNorm(EMBED, rngs=rngs) for _ in range(2))
        self.query, self.key, self.value = (nnx.LinearGeneral(EMBED, heads, rngs=rngs) for _ in range(3))
        self.out = nnx.LinearGeneral(heads, EMBED, axis=(-2, -1), kernel_init=small, rngs=rngs)
        self.up, self.down = nnx.Linear(EMBED, WIDE, rngs=rngs), nnx.Linear(WIDE, EMBED, kernel_init=small, rngs=rngs)

    def __call__(self, x):
        y, causal = self.norm1(x), jnp.tril(jnp.ones((SEQ, SEQ), bool))
        scores = jnp.einsum("bshd,bthd->bhst", self.query(y), self.key(y)) * (EMBED // HEADS) ** -0.5
        weights = jax.nn.softmax(jnp.where(causal, scores, -1e9))
        x = x + self.out(jnp.einsum("bhst,bthd->bshd", weights, self.value(y)))
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class GPT(nnx.Module):
    def __init__(self, rngs):
        self.embed, self.position = (nnx.Param(0.02 * rngs.normal((n, EMBED))) for n in (VOCABULARY, SEQ))
        self.layers, self.norm = nnx.vmap(Block)(rngs.fork(split=LAYERS)), nnx.LayerNorm(EMBED, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed[tokens] + self.position[...]
        block, layers = nnx.split(self.layers)
        x, _ = jax.lax.scan(lambda x, layer: (nnx.merge(block, layer)(x), None), x, layers)
        return self.norm(x) @ self.embed.T


graph = nnx.graphdef(nnx.eval_shape(lambda: GPT(nnx.Rngs(0))))
schedule = optax.warmup_cosine_decay_schedule(0.0, 3e-3, warmup_steps=20, decay_steps=STEPS)
optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.95))


def predict(params, tokens):
    return nnx.merge(graph, params)(tokens)


@jax.jit
def loss(params, batch):
    logits = predict(params, batch["inputs"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()


def step(params, opt_state, batch):
    value, gradient = jax.value_and_grad(loss)(params, batch)
    updates, opt_state = optimizer.update(gradient, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, value


def init():
    params = nnx.to_pure_dict(nnx.state(GPT(nnx.Rngs(0))))
    return params, optimizer.init(params)


program = md.Program(
    step,
    (*jax.eval_shape(init), dict.fromkeys(("inputs", "targets"), jax.ShapeDtypeStruct((BATCH, SEQ), jnp.int32))),
    layouts={"batch/*": "data=S(0)", "params/layers/up/kernel": "model=S(2)"},
    init=init,
    batches=lambda: text.text_batches(text.load().train, BATCH, SEQ),
    evaluate=lambda p, _: {"held-out loss": [loss(p, b) for b in text.fixed_batches(text.load().held_out, BATCH, SEQ)]},
    steps=STEPS,
)

if __name__ == "__main__":
    print(md.parallelize(step, md.Mesh(data=4, model=2), layouts=program.layouts).plan(*program.args))
