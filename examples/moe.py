"""A mixture of experts on the text of ``make demo``: each token is routed to two of eight experts.

    python -m meshdsl.training.datasets.text  # downloads the text, once
    meshdsl train examples/moe.py --mesh data=4,model=2

Experts are split over ``model``, the batch over ``data``. Training includes the balance loss, evaluation does not:
held-out loss is 4.29 nats per token (unigram entropy: 6.03).
"""

from dataclasses import replace

import jax
import numpy as np
import optax

import meshdsl as md
from meshdsl.models import mixture
from meshdsl.models.training import model_function
from meshdsl.training.datasets import text
from meshdsl.training.evaluate import gather

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
# Evaluation drops no tokens: whether one is dropped depends on later ones.
model = model_function(lambda rngs: mixture.Model(replace(config, ranks=1), rngs))


@jax.jit
def loss(params, batch):
    logits, _ = model(params)(md.named(batch["inputs"], "batch seq"))
    return optax.softmax_cross_entropy_with_integer_labels(logits.array, batch["targets"]).mean()


def evaluate(params, _):
    """Returns the held-out loss in nats per token; the unigram entropy is 6.025."""
    params = gather(params)
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
