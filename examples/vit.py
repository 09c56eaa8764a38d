"""ViT on pictures of clothes, or on scanned digits where those are not installed.

    apt-get install dataset-fashion-mnist                       # or not: then it learns the digits
    meshdsl train examples/vit.py --mesh data=4,model=2

The batch is split over ``data``; heads of attention and the hidden dim of the perceptron over ``model``. Of the
held-out pictures of clothes 0.88 are named rightly after these steps, six epochs; of the digits 0.94.
"""

from dataclasses import replace

import jax
import optax

import meshdsl as md
from meshdsl.models import vit
from meshdsl.models.training import bound
from meshdsl.training.batches import Batches
from meshdsl.training.datasets.images import CLASSES, load
from meshdsl.training.evaluate import gathered

BATCH, STEPS = 256, 1500

images = load()
config = vit.Config(4, 64, heads=8, patch=images.side // 4, image=images.side, channels=1, classes=CLASSES)
schedule = optax.warmup_cosine_decay_schedule(0.0, 2e-3, warmup_steps=100, decay_steps=STEPS)
model = bound(lambda rngs: vit.ViT(config, rngs))


@jax.jit
def logits(params, pictures):
    return model(params)(md.named(pictures, "batch height width channels")).array


def evaluate(params, _):
    """How many of the held-out pictures are named rightly."""
    found, labels = logits(gathered(params), images.held_out["images"]), images.held_out["labels"]
    loss = optax.softmax_cross_entropy_with_integer_labels(found, labels).mean()
    return {"held-out loss": loss, "accuracy": found.argmax(1) == labels}


program = replace(
    vit.program(config, vit.RULES["tensor"], BATCH, optax.adamw(schedule, weight_decay=0.05)),
    batches=lambda: Batches(images.records(), BATCH, "images"),
    evaluate=evaluate,
    steps=STEPS,
)

if __name__ == "__main__":
    print(md.parallelize(program.step, md.Mesh(data=4, model=2), rules=program.rules).plan(*program.args))
