"""Training programs that others published: their own steps, imported from your checkouts, planned, checked, trained.

    python -m bench.programs --checkouts FOLDER        or        make zoo CHECKOUTS=FOLDER

No code of theirs is in this repository. ``adapter`` says what an adapter is; each module named in ``REGISTRY`` holds
the adapters of one kind of program; ``nested`` finds a step that a training function defines inside itself; ``steps``
runs a step, ``measure`` measures one program, ``page`` writes docs/evidence/programs.md. ``sharded`` has programs that
state shardings themselves, for ``bench.inspections``.
"""

from collections.abc import Mapping
from importlib import import_module

from bench.programs.adapter import Adapter

REGISTRY = {  # program -> module, in which it is a constant in capitals
    "imagenet": "images",
    "imagenet_scaled": "images",
    "vit": "images",
    "dit": "diffusion",
    "ddpm": "diffusion",
    "gemma": "gemma",
    "conformer": "speech",
    "ppo": "control",
    "sac": "control",
    "haiku_lm": "transformers",
    "nanogpt": "transformers",
    "equinox_gpt": "transformers",
    "s4": "sequences",
    "molecules": "graphs",
    "lora": "finetuning",
}
# programs that state shardings themselves
STATED = dict.fromkeys(("lm1b", "easylm", "big_vision", "maxtext"), "sharded")


def adapters(registry: Mapping[str, str] = REGISTRY) -> dict[str, Adapter]:
    """Returns all programs of a registry by name."""
    return {name: getattr(import_module(f"bench.programs.{module}"), name.upper()) for name, module in registry.items()}
