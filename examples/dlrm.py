"""DLRM on flights: predicts delays from schedule, plane and weather, without the delay at the gate.

    python -m meshdsl.training.datasets.flights  # downloads the flights, once
    meshdsl train examples/dlrm.py --mesh data=4,model=2

The rows of the embedding table are split over ``model``, the batch over ``data``. Every fifth day is held out; on these
days, AUC is 0.70 (0.5 is chance) and accuracy 0.76 (always predicting "on time": 0.752).
"""

from dataclasses import replace

import jax
import numpy as np
import optax
from sklearn.metrics import roc_auc_score

import meshdsl as md
from meshdsl.models import dlrm
from meshdsl.models.training import model_function
from meshdsl.training.batches import Batches, shuffled
from meshdsl.training.datasets.flights import load
from meshdsl.training.evaluate import gather

BATCH, STEPS = 1024, 400

flights = load()
config = dlrm.Config(flights.features, dense=10, embed=16, bottom=(64, 16), top=(128, 64))
schedule = optax.cosine_decay_schedule(2e-3, STEPS)
model = model_function(lambda rngs: dlrm.DLRM(config, rngs))


@jax.jit
def odds(params, dense, sparse):
    return model(params)(md.named(dense, "batch dense"), md.named(sparse, "batch feature")).array


def evaluate(params, _):
    """Returns held-out loss, AUC and accuracy, and the accuracy of always predicting "on time"."""
    late = flights.held_out["labels"]
    found = np.asarray(odds(gather(params), flights.held_out["dense"], flights.held_out["sparse"]))
    loss = np.mean(np.logaddexp(0, found) - found * late)
    right = np.mean((found > 0) == late)
    return {"held-out loss": loss, "AUC": roc_auc_score(late, found), "accuracy": right, "never late": 1 - late.mean()}


program = replace(
    dlrm.program(config, dlrm.RULES["tensor"], BATCH, optax.adamw(schedule, weight_decay=0.1)),
    batches=lambda: Batches(shuffled(flights.train), BATCH, "flights"),
    evaluate=evaluate,
    steps=STEPS,
)

if __name__ == "__main__":
    print(md.parallelize(program.step, md.Mesh(data=4, model=2), rules=program.rules).plan(*program.args))
