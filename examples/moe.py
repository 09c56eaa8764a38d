"""A mixture of experts on the text of ``make demo``: each token is sent to two of eight perceptrons.

    python -m meshdsl.training.datasets.text  # fetches the text, once
    meshdsl train examples/moe.py --mesh data=4,model=2

Experts are split over ``model``, the batch over ``data``. The balance loss is trained on, but not part of what is
measured on the held-out works: 4.29 nats per token after these steps (6.03 for who only knows how often each occurs).
"""

from dataclasses import replace

import jax
import numpy as np
import optax

import meshdsl as md
from meshdsl.models import mixture
from meshdsl.models.training import bound
from meshdsl.training.datasets import text
from meshdsl.training.evaluate import gathered

BATCH, SEQ, STEPS = 64, 32, 400

config = mixture.Config(
    layers=3,
    embed=128,
    hidden=256,
    heads=8,
    groups=4,
    head=16,
    seq=SEQ,
    vocab=text.VOCABULARY,
    rate=2e-3,
    experts=8,
    choices=2,
    group=SEQ,
)
# Measured without dropping: whether a token is dropped depends on those after it.
model = bound(lambda rngs: mixture.Model(replace(config, capacity=0), rngs))


@jax.jit
def loss(params, batch):
    logits, _ = model(params)(md.named(batch["inputs"], "batch seq"))
    return optax.softmax_cross_entropy_with_integer_labels(logits.array, batch["targets"]).mean()


def evaluate(params, _):
    """Nats per token of the held-out works; 6.025 for who knows how often each token occurs, and nothing else."""
    params = gathered(params)
    held_out = text.fixed_batches(text.load().held_out, BATCH, SEQ)
    return {"held-out loss": np.mean([loss(params, batch) for batch in held_out])}


program = replace(
    mixture.program(config, "batch:data experts:model", BATCH),
    batches=lambda: text.text_batches(text.load().train, BATCH, SEQ),
    evaluate=evaluate,
    steps=STEPS,
)

if __name__ == "__main__":
    print(md.parallelize(program.step, md.Mesh(data=4, model=2), rules=program.rules).plan(*program.args))
