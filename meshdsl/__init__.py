"""meshdsl: plan a whole training step over a device mesh, read the plan, run exactly that plan.

    import meshdsl as md

    sharded = md.parallelize(step, md.Mesh(data=4, model=2), layouts={"batch": "data=S(0)"})
    print(sharded.plan(params, batch))       # predicted seconds, memory and every collective with its reason
    params = sharded(params, batch)          # runs exactly that plan

``dir(md)`` lists planning and running, pipelines, layouts and errors. Functions on tensors with named dims live in
``md.nd``; ``md.softmax`` is the same function as ``md.nd.softmax``. The public names are those of ``__init__.pyi``,
imported on first use, so that ``import meshdsl.layouts`` does not import jax.
"""

from pathlib import Path
from typing import Any

from meshdsl.util.stubs import attach_stub

_ROOT = Path(__file__).resolve().parent.parent
_CHECKOUT = not (Path(__file__).parent / "layouts").exists() and (_ROOT / "layouts").exists()
if _CHECKOUT:
    __path__.append(str(_ROOT))  # layouts/, lowering/ and models/ lie beside this package

_public_name, __dir__, __all__ = attach_stub(__name__, __file__)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from meshdsl.util.version import version

        return version()
    return _public_name(name)
