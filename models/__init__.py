"""Models written with meshdsl, each with sizes from the papers and rules for its usual strategies.

program = meshdsl.models.build("gpt2-124m", batch=64)
md.parallelize(program.step, mesh, rules=program.rules).plan(*program.args)
"""

from importlib import import_module
from typing import Any

from meshdsl.errors import ArgumentError, nearest

_GPT2, _GPT3 = "124m 355m 774m 1.5b".split(), "125m 350m 760m 1.3b 2.7b 6.7b 13b 175b".split()
_HOME = dict.fromkeys([f"gpt2-{size}" for size in _GPT2] + [f"gpt3-{size}" for size in _GPT3], "meshdsl.models.gpt")
_HOME |= dict.fromkeys(("vit-b", "vit-l", "vit-h"), "meshdsl.models.vit")
_RESNETS = "resnet50 resnet101 resnet152 wide-resnet50-2 wide-resnet101-2".split()
_HOME |= dict.fromkeys(_RESNETS, "meshdsl.models.resnet")
NAMES = tuple(_HOME)


def build(name: str, strategy: str = "tensor", **sizes: int) -> Any:
    """The ``md.Program`` of a model: its training step and the shapes of its arguments.

    Args:
      name: one of ``NAMES``.
      strategy: which of the model's ``RULES``.
      sizes: what the model's ``program`` takes, such as ``batch`` and ``seq``.

    Raises ArgumentError for a name or strategy that there is not.
    """
    if name not in _HOME:
        raise ArgumentError(f"no model {name!r}{nearest(name, NAMES)}")
    module = import_module(_HOME[name])
    if strategy not in module.RULES:
        raise ArgumentError(f"{name} has no strategy {strategy!r}{nearest(strategy, module.RULES)}")
    return module.program(name, module.RULES[strategy], **sizes)
