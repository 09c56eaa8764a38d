"""Wide and Deep on MovieLens-100K: predicts whether a person likes a film.

    python -m meshdsl.training.datasets.movies  # downloads the ratings, once
    meshdsl train examples/movies.py --mesh data=4,model=2

The rows of the embedding table are split over ``model``, the batch over ``data``. On the held-out fifth of the ratings,
AUC is 0.77 (0.5 is chance) and accuracy 0.70 (always predicting "liked": 0.55).
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
from meshdsl.training.datasets.movies import load
from meshdsl.training.evaluate import gather

BATCH, STEPS = 1024, 400

ratings = load()
config = dlrm.Config(ratings.features, dense=2, embed=16, top=(64, 32), wide=True)
schedule = optax.cosine_decay_schedule(3e-3, STEPS)
model = model_function(lambda rngs: dlrm.WideAndDeep(config, rngs))


@jax.jit
def odds(params, dense, sparse):
    return model(params)(md.named(dense, "batch dense"), md.named(sparse, "batch feature")).array


def evaluate(params, _):
    """Returns held-out loss, AUC and accuracy."""
    liked = ratings.held_out["labels"]
    found = np.asarray(odds(gather(params), ratings.held_out["dense"], ratings.held_out["sparse"]))
    loss = np.mean(np.logaddexp(0, found) - found * liked)
    return {"held-out loss": loss, "AUC": roc_auc_score(liked, found), "accuracy": (found > 0) == liked}


program = replace(
    dlrm.program(config, dlrm.RULES["tensor"], BATCH, optax.adamw(schedule, weight_decay=0.1)),
    batches=lambda: Batches(shuffled(ratings.train), BATCH, "ratings"),
    evaluate=evaluate,
    steps=STEPS,
)

if __name__ == "__main__":
    print(md.parallelize(program.step, md.Mesh(data=4, model=2), rules=program.rules).plan(*program.args))
