"""Models on named dims, with the sizes of their papers and layout rules for their usual strategies.

program = meshdsl.models.build("gpt2-124m", batch=64)
md.parallelize(program.step, mesh, rules=program.rules).plan(*program.args)
"""

from importlib import import_module
from typing import Any

from meshdsl.errors import ArgumentError, nearest

_FAMILIES = {
    "dlrm": "dlrm wide-and-deep",
    "gpt": "gpt2-124m gpt2-355m gpt2-774m gpt2-1.5b "
    "gpt3-125m gpt3-350m gpt3-760m gpt3-1.3b gpt3-2.7b gpt3-6.7b gpt3-13b gpt3-175b",
    "llama": "llama3-8b llama3-70b llama3-405b",
    "mixture": "switch-base mixtral-8x7b deepseek-moe-16b",
    "recurrent": "mamba-130m mamba-370m mamba-790m mamba-1.4b mamba-2.8b",
    "resnet": "resnet50 resnet101 resnet152 wide-resnet50-2 wide-resnet101-2",
    "t5": "t5-small t5-base t5-large t5-3b t5-11b",
    "vit": "vit-b vit-l vit-h",
}
_HOME = {name: f"meshdsl.models.{module}" for module, names in _FAMILIES.items() for name in names.split()}
NAMES = tuple(_HOME)


def build(name: str, strategy: str = "tensor", **sizes: int) -> Any:
    """Returns the ``md.Program`` of a model: its training step and the shapes of its arguments.

    Args:
      name: one of ``NAMES``.
      strategy: a key of the model's ``RULES``.
      sizes: keyword arguments of the model's ``program``, such as ``batch`` and ``seq``.

    Raises:
      ArgumentError: for an unknown name or strategy.
    """
    if name not in _HOME:
        raise ArgumentError(f"no model {name!r}{nearest(name, NAMES)}")
    module = import_module(_HOME[name])
    if strategy not in module.RULES:
        raise ArgumentError(f"{name} has no strategy {strategy!r}{nearest(strategy, module.RULES)}")
    return module.program(name, module.RULES[strategy], **sizes)
