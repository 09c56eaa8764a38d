"""meshdsl: plan a whole training step over a device mesh, read the plan, run exactly that plan.

Names are loaded on first use, so that ``import meshdsl.layouts`` does not import jax.
"""

from importlib import import_module
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parent.parent
if not (Path(__file__).parent / "layouts").exists() and (_ROOT / "layouts").exists():
    __path__.append(str(_ROOT))  # a checkout: layouts/, lowering/ and models/ lie beside this package

_NAMES = {
    "meshdsl.layouts": (
        "B",
        "Layout",
        "Mesh",
        "P",
        "Rules",
        "S",
        "Topology",
        "topology",
    ),
    "meshdsl.errors": (
        "CheckError",
        "MeshDSLError",
        "VerifyError",
    ),
    "meshdsl.dsl.constrain": ("constrain",),
    "meshdsl.custom_rules": ("rule",),
    "meshdsl.dsl.dims": (
        "Dims",
        "DimsLike",
        "dims",
    ),
    "meshdsl.dsl.named_array": (
        "NamedArray",
        "Tensor",
        "named",
    ),
    "meshdsl.dsl.math": (
        *("apply", "where", "exp", "log", "log1p", "expm1", "sqrt", "rsqrt", "square", "sign", "sin", "cos", "tanh"),
        *("sigmoid", "relu", "gelu", "silu", "softplus", "maximum", "minimum", "clip", "isfinite", "logical_not"),
        *("floor", "round", "stop_gradient"),
        *("sum", "mean", "prod", "max", "min", "any", "all", "var", "std", "logsumexp", "norm", "argmax", "argmin"),
        *("softmax", "log_softmax", "rms_norm", "layer_norm"),
        "dot",
        "cumsum",
        "cumprod",
        "cummax",
        "cummin",
        "cumlogsumexp",
        "cross_entropy",
    ),
    "meshdsl.dsl.shape": (
        "rename",
        "order",
        "split",
        "merge",
        "broadcast",
        "concat",
        "pack",
        "padded",
        "roll",
        "flip",
        "index",
        "take",
        "update",
        "top_k",
        "sort",
        "argsort",
    ),
    "meshdsl.dsl.create": (
        "zeros",
        "ones",
        "full",
        "arange",
        "one_hot",
        "causal",
        "normal",
        "truncated_normal",
        "uniform",
        "fan_in",
        "bernoulli",
        "categorical",
        "dropout",
    ),
    "meshdsl.dsl.window": (
        "conv",
        "max_pool",
        "sum_pool",
    ),
    "meshdsl.dsl.control_flow": (
        "scan",
        "vmap",
        "keep",
        "remat",
        "stack",
    ),
    "meshdsl.api": (
        "Program",
        "Sharded",
        "parallelize",
    ),
    "meshdsl.schedules.schedule": (
        "make_schedule",
        "Schedule",
    ),
    "meshdsl.schedules.spec": ("Pipeline",),
    "meshdsl.plan": (
        "Plan",
        "load_plan",
    ),
    "meshdsl.api.mesh_search": ("search",),
    "meshdsl.primitives.stage": ("stage",),
    "meshdsl.api.watch": ("watch",),
}
_HOME = {name: module for module, names in _NAMES.items() for name in names}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        from meshdsl.errors import nearest

        raise AttributeError(f"meshdsl has no {name!r}{nearest(name, __all__)}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return __all__
