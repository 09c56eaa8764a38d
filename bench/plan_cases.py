"""Planning problems for ``bench.same_plans``: every kind of step, mesh, pin, limit and schedule of the planner.

A case is a sharded step and the shapes of its arguments. Steps are planned but not run, so no devices are needed. Cases
are named ``group/what/where``:

* ``models``: the families of ``models/`` at their papers' sizes on one, two and three axes, memory unlimited
* ``rules``: the same families, small, under their usual strategies (named dims, layout rules, remat, experts)
* ``gallery``: ``examples/strategies``
* ``zoo``: models of other libraries, where these are installed
* ``pipelines``: every schedule over a scan of layers and over ``md.stage`` cuts; microbatches without stages
* ``memory``: binding limits, and infeasible ones
* ``pins``: pinned inputs, outputs and intermediate values, and replanning with ``Sharded.with_pins``
* ``uneven``: dims that do not divide over the mesh, padded or not
* ``overlap``: plans chosen by simulated time with overlap
* ``steps``: named dims with loops, recurrence, an evaluation, a data-dependent loop
* ``unrolled``: GPT-3 175B, Llama 3 405B and other deep steps with unrolled layers

The zoo's ``inference`` is excluded: numpyro sums the terms of the log density in the order of a set of strings, so
every process traces a different program.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from importlib.util import find_spec
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

import meshdsl as md
from bench import deep_steps, memory, rolled_buffer, unrolled
from bench.example_steps import deep_gpt, load_example
from bench.planner.cases import FAMILIES, MESHES, TOPOLOGY, program_of
from bench.planning import THREE, TWO
from bench.strategies import FILES, Strategy

UNLIMITED = 1e15
ZOO_PACKAGES = ("diffrax", "equimo", "haiku", "jraph", "keras_rs", "mamba2_jax", "nano_moe", "numpyro", "pdequinox")
ZOO_EXCLUDED = ("inference",)


class Problem(NamedTuple):
    """A sharded step and the arguments to plan it for."""

    sharded: md.Sharded
    args: tuple[Any, ...]


class Case(NamedTuple):
    """A named case: ``make`` builds a new problem; ``quick`` cases are part of every recording."""

    make: Callable[[], Problem]
    quick: bool = False


Cases = Iterator[tuple[str, Case]]


def plan_cases() -> dict[str, Case]:
    """Returns all cases by name, in recording order."""
    groups = (_models, _rules, _gallery, _zoo, _pipelines, _memory, _pins, _uneven, _overlap, _steps, _unrolled)
    return {f"{group.__name__[1:]}/{name}": case for group in groups for name, case in group()}


def missing_zoo_packages() -> list[str]:
    """Returns the missing packages of the zoo; its cases need all of them."""
    return [name for name in (*ZOO_PACKAGES, "transformers") if find_spec(name) is None]


def sharded(make: Callable[[], md.Program], mesh: md.Mesh | str, **options: Any) -> Problem:
    """Returns a program over a mesh; ``options`` override the program's layouts, rules and pipeline."""
    program = make()
    own = {"layouts": program.layouts, "rules": program.rules, "pipeline": program.pipeline}
    return Problem(md.parallelize(program.step, mesh, **(own | options)), program.args)


def limited(part: float, make: Callable[[], md.Program], mesh: md.Mesh | str, **options: Any) -> Problem:
    """Returns ``sharded`` under a memory limit of ``part`` times the memory of the plan without a limit."""
    free = sharded(make, mesh, memory=UNLIMITED, **options)
    return sharded(make, mesh, memory=part * free.sharded.plan(*free.args).memory, **options)


def repinned(pins: Mapping[str, str | None], make: Callable[[], Problem]) -> Problem:
    """Plans a problem, then returns it under changed pins, to be replanned from that plan."""
    first = make()
    first.sharded.plan(*first.args)
    return Problem(first.sharded.with_pins(pins), first.args)


def built(name: str, strategy: str = "data", **sizes: int) -> md.Program:
    """Returns the program of a model of ``meshdsl.models``."""
    from meshdsl import models

    return models.build(name, strategy, **sizes)


def node(axes: str) -> md.Mesh:
    """Returns a mesh over DGX H100 nodes."""
    return md.Mesh.parse(axes, TOPOLOGY)


# ------------------------------------------------------------------------------------------------- models and galleries


def _models() -> Cases:
    quick = ("mlp", "dlrm", "gpt2-124m", "switch-base", "mamba-130m")
    for name in FAMILIES:
        for axes in MESHES:
            few = axes == MESHES[1] or (name == "mlp" and axes == MESHES[2])
            options = {"rules": "batch:data", "memory": UNLIMITED}
            yield (
                f"{name}/{axes}",
                Case(partial(sharded, partial(program_of, name), node(axes), **options), few and name in quick),
            )


def _rules() -> Cases:
    strategies, quick = (
        ("tensor", "fsdp+tensor", "zero", "expert", "spatial"),
        {"gpt, remat/fsdp+tensor", "resnet/spatial"},
    )
    for family, (module, make) in memory.FAMILIES.items():
        for strategy in strategies:
            if strategy in module.RULES:
                name = f"{family}/{strategy}"
                program = partial(make, module.RULES[strategy])
                yield name, Case(partial(sharded, program, "data=4,model=2", donate_argnums=(0, 1)), name in quick)


def _gallery() -> Cases:
    quick = ("accumulation", "context_parallel", "hierarchical", "summa", "zero3")
    for file in FILES:
        yield file.stem, Case(partial(_strategy, file), file.stem in quick)


def _strategy(file: Any) -> Problem:
    strategy = Strategy(file)
    return Problem(strategy.sharded(), strategy.program.args)


def _zoo() -> Cases:
    if missing_zoo_packages():
        return
    from bench.zoo.measure import CASES, MESH

    for name in CASES:
        if name not in ZOO_EXCLUDED:
            for mesh in (MESH, node(MESHES[0])):
                where = f"{mesh.topology.name},{mesh}"
                yield f"{name}/{where}", Case(partial(_of_zoo, name, mesh), name == "recurrent" and mesh is MESH)


def _of_zoo(name: str, mesh: md.Mesh) -> Problem:
    from bench.zoo.measure import on_mesh

    program = _zoo_program(name)
    return Problem(on_mesh(program, mesh), program.args)


@cache
def _zoo_program(name: str) -> md.Program:
    """Returns the program of a zoo case; cached, since initialising the parameters is slow."""
    from bench.zoo import measure

    return measure.build_case(name).program()


# ------------------------------------------------------------------------------------------------------------ pipelines

LAYERS_OVER_PIPE = {"params/layers/*": "pipe=S(0)", "batch/*": "data=S(0)"}
SIZES = rolled_buffer.Sizes(layers=8, embed=64, hidden=256, words=256, seq=16, microbatches=8, each=4)


def _pipelines() -> Cases:
    scanned = {
        "gpipe": md.Pipeline(8, "gpipe"),
        "1f1b": md.Pipeline(8, "1f1b"),
        "interleaved": md.Pipeline(8, "interleaved", 2),
        "zero-bubble": md.Pipeline(8, "zb"),
        "zero-bubble, 2 chunks": md.Pipeline(8, "zb", 2),
        "zero-bubble V table": md.Pipeline(8, md.make_schedule("zb-v", 4, 8)),
        "1f1b table": md.Pipeline(8, md.make_schedule("1f1b", 4, 8)),
        "1f1b, nothing recomputed": md.Pipeline(8, recompute="none"),
        "1f1b, uneven layers": md.Pipeline(8, layers=(1, 2, 3, 2)),
    }
    quick, three = ("gpipe", "1f1b", "interleaved", "zero-bubble"), ("1f1b", "zero-bubble")
    for name, pipeline in scanned.items():
        for axes in ("pipe=4,data=2", "pipe=4,data=2,model=2"):
            if axes == "pipe=4,data=2" or name in three:
                options = {"layouts": LAYERS_OVER_PIPE, "pipeline": pipeline, "donate_argnums": 0}
                make = partial(sharded, _decoder, axes, **options)
                yield f"scan, {name}/{axes}", Case(make, name in quick and "model" not in axes)
    cut = {
        "gpipe": (4, md.Pipeline(4, "gpipe", axis="pipe")),
        "1f1b": (4, md.Pipeline(4, axis="pipe")),
        "1f1b, balanced": (2, md.Pipeline(4, axis="pipe")),
        "interleaved": (2, md.Pipeline(4, "interleaved", 2, axis="pipe")),
        "table": (4, md.Pipeline(4, md.make_schedule("1f1b", 4, 4), axis="pipe")),
    }
    for name, (stages, pipeline) in cut.items():
        options = {"layouts": {"batch/*": "data=S(0)"}, "pipeline": pipeline}
        make = partial(sharded, _cut_program, f"pipe={stages},data=2", **options)
        yield f"stage cuts, {name}/pipe={stages},data=2", Case(make, name in ("1f1b", "interleaved"))
    once = {"layouts": {"batch/*": "data=S(0)"}, "pipeline": md.Pipeline(4)}
    yield "microbatches alone/data=4,model=2", Case(partial(sharded, _decoder, "data=4,model=2", **once), True)
    rules = {"rules": "batch:data layers:pipe", "pipeline": md.Pipeline(8), "memory": UNLIMITED}
    gpt2 = partial(sharded, partial(built, "gpt2-124m"), node("pipe=4,data=2"), **rules)
    yield "gpt2-124m, 1f1b/pipe=4,data=2", Case(gpt2)


def _decoder() -> md.Program:
    """Returns a decoder in plain JAX, its layers in a scan."""
    return md.Program(rolled_buffer.step, rolled_buffer.arguments(SIZES))


def _cut_program() -> md.Program:
    """Returns four stages of different widths: tied embeddings, a penalty from two stages, a mask in the last."""
    sizes = ({"w": (64, 96)}, {"w": (96, 144), "b": (144,)}, {"up": (144, 80), "down": (80, 112)}, {"w": (112, 96)})
    params = [{name: unrolled.shape(*lengths) for name, lengths in part.items()} for part in sizes]
    batch = {"x": unrolled.shape(64, 64), "y": unrolled.shape(64, 64), "mask": unrolled.shape(64)}

    def loss(params: Any, batch: Any) -> jax.Array:
        x = batch["x"] @ params[0]["w"]
        penalty = jnp.mean(x**2)
        x = md.stage(x)
        x, penalty = md.stage((jnp.tanh(x @ params[1]["w"] + params[1]["b"]), penalty))
        hidden = jax.nn.relu(x @ params[2]["up"])
        x = md.stage(x[:, :112] + hidden @ params[2]["down"])
        made = x @ params[3]["w"] @ params[0]["w"].T
        return jnp.mean((made - batch["y"]) ** 2 * batch["mask"][:, None]) + 0.01 * (penalty + jnp.mean(hidden**2))

    return md.Program(_descent(loss), (params, batch))


def _descent(loss: Callable[[Any, Any], jax.Array]) -> Callable[[Any, Any], Any]:
    """Returns a step of gradient descent."""

    def step(params: Any, batch: Any) -> Any:
        value, gradient = jax.value_and_grad(loss)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient), value

    return step


# ------------------------------------------------------------------------------------------------- memory, pins, uneven


def _memory() -> Cases:
    parts = {"gpt": 0.95, "gpt, remat": 0.75, "mixture": 0.97, "mlp": 0.7, "resnet": 0.93, "t5": 0.85}
    for family, part in parts.items():
        module, make = memory.FAMILIES[family]
        options = {"donate_argnums": (0, 1)}
        problem = partial(limited, part, partial(make, module.RULES["data"]), "data=4,model=2", **options)
        yield f"{family}, {part} of the free plan's/data=4,model=2", Case(problem, family in ("gpt", "mlp"))
    piped = {"layouts": LAYERS_OVER_PIPE, "pipeline": md.Pipeline(8), "donate_argnums": 0}
    yield (
        "scan, 1f1b, 0.7 of the free plan's/pipe=4,data=2",
        Case(partial(limited, 0.7, _decoder, "pipe=4,data=2", **piped)),
    )
    large = partial(built, "gpt3-13b", batch=64)
    donated = {"memory": 160e9, "donate_argnums": (0, 1)}
    yield "gpt3-13b, 160 GB/data=8,model=8", Case(partial(sharded, large, node("data=8,model=8"), **donated))
    for part in (0.9, 0.75, 0.2):
        yield (
            f"two products, {part} of the free plan's/data=4,model=2",
            Case(partial(limited, part, _two_products, "data=4,model=2"), True),
        )
    yield "fits only padded/model=8", Case(partial(sharded, _wide_product, "model=8", memory="12MB"), True)
    mlp = partial(sharded, partial(program_of, "mlp"), node("data=8"), rules="batch:data", memory="1MB")
    yield "mlp, no plan fits/data=8", Case(mlp, True)
    llama = partial(sharded, partial(program_of, "llama3-8b"), node(MESHES[1]), rules="batch:data")
    yield f"llama3-8b, no plan fits/{MESHES[1]}", Case(llama)
    large = partial(built, "gpt3-175b", "fsdp", batch=8)
    yield "gpt3-175b, no plan fits/data=8", Case(partial(sharded, large, node("data=8")))


def _two_products() -> md.Program:
    params = {"up": unrolled.shape(64, 256), "down": unrolled.shape(256, 64)}

    def loss(params: Any, x: jax.Array) -> jax.Array:
        return jnp.mean((jax.nn.relu(x @ params["up"]) @ params["down"] - x) ** 2)

    return md.Program(_descent(loss), (params, unrolled.shape(512, 64)), {"batch": "data=S(0)"})


def _wide_product() -> md.Program:
    """Returns a product whose uneven dims leave it replicated unless it is padded."""
    return md.Program(lambda x, w: jnp.square(x @ w).sum(), (unrolled.shape(63, 8), unrolled.shape(8, 100_001)))


def _pins() -> Cases:
    where = "data=4,model=2"
    demo = partial(sharded, lambda: load_example("gpt").program, where)
    plain = partial(sharded, _two_products, where)
    pinned = {"batch": "data=S(0)", "params/up": "model=S(1)", "params/down": "data=S(1)"}
    gpt = partial(sharded, partial(program_of, "gpt2-124m"), node(where), rules="batch:data", memory=UNLIMITED)
    tight = partial(limited, 0.9, _two_products, where)
    yield f"inputs/{where}", Case(partial(sharded, _two_products, where, layouts=pinned), True)
    yield (
        f"outputs/{where}",
        Case(partial(sharded, _two_products, where, outputs={"0/up": "data=S(0) model=S(1)"}), True),
    )
    yield (
        f"intermediate values/{where}",
        Case(partial(sharded, partial(_tied, 128, "data=S(0) model=S(1)"), where), True),
    )
    yield f"demo/{where}", Case(demo, True)
    yield f"demo, replanned/{where}", Case(partial(repinned, {"params/embed": "data=S(0)"}, demo), True)
    yield f"demo, pin removed/{where}", Case(partial(repinned, {"params/layers/up/kernel": None}, demo))
    yield (
        f"two products, replanned/{where}",
        Case(partial(repinned, {"params/up": "data=S(0) model=S(0)"}, plain), True),
    )
    yield (
        f"two products, pin removed/{where}",
        Case(partial(repinned, {"params/up": None}, partial(repinned, {"params/up": "data=S(0) model=S(0)"}, plain))),
    )
    yield f"two products, limited, replanned/{where}", Case(partial(repinned, {"params/up": "model=S(1)"}, tight), True)
    yield f"gpt2-124m, replanned/{where}", Case(partial(repinned, {"params/blocks/block/up/kernel": "model=S(2)"}, gpt))
    padded = partial(sharded, partial(_tied, 103, "model=S(1)"), "model=8")
    yield "padded, replanned/model=8", Case(partial(repinned, {"params/bias": "model=B"}, padded))
    deep = partial(sharded, partial(deep_gpt, 12), "data=8,model=8")
    yield "GPT of 12 layers, replanned/data=8,model=8", Case(partial(repinned, {"params/position": "data=S(0)"}, deep))


def _tied(vocabulary: int, pin: str = "", width: int = 16, tokens: int = 32) -> md.Program:
    """Returns a model of one embedding, tied to the logits, with a bias on them."""
    params = {"embed": unrolled.shape(vocabulary, width), "bias": unrolled.shape(vocabulary)}
    ids = jax.ShapeDtypeStruct((tokens,), jnp.int32)

    def loss(params: Any, batch: Any) -> jax.Array:
        logits = params["embed"][batch["ids"]] @ params["embed"].T + params["bias"]
        return unrolled.cross_entropy(md.constrain(logits, pin) if pin else logits, batch["labels"])

    return unrolled.training_program(loss, optax.adam(1e-2), params, {"ids": ids, "labels": ids}, {})


def _uneven() -> Cases:
    yield (
        "stated split/data=4,model=2",
        Case(partial(sharded, partial(_tied, 103, "model=S(1)"), "data=4,model=2"), True),
    )
    yield "padding that pays/model=8", Case(partial(sharded, partial(_tied, 1009, "", 256, 512), "model=8"), True)
    yield "padding that does not pay/data=8", Case(partial(sharded, partial(_tied, 103), "data=8"), True)
    gpt2 = partial(_tied, 50257, "", 768, 2048)
    yield "GPT-2's vocabulary/model=8", Case(partial(sharded, gpt2, node("model=8")))
    yield "GPT-2's vocabulary/pod=2,data=2,model=2", Case(partial(sharded, gpt2, node("pod=2,data=2,model=2")))
    yield "batch of 30/data=4,model=2", Case(partial(sharded, partial(_tied, 128, "", 64, 30), "data=4,model=2"))


# ------------------------------------------------------------------------------------------------- overlap, other steps


def _overlap() -> Cases:
    for family, strategy in (("gpt", "data"), ("llama", "fsdp"), ("mlp", "data"), ("recurrent", "tensor")):
        module, make = memory.FAMILIES[family]
        options = {"overlap": True, "donate_argnums": (0, 1)}
        program = partial(make, module.RULES[strategy])
        yield (
            f"{family}, {strategy}/data=4,model=2",
            Case(partial(sharded, program, "data=4,model=2", **options), family == "mlp"),
        )
    options = {"rules": "batch:data", "memory": UNLIMITED, "overlap": True}
    yield f"gpt2-124m/{MESHES[1]}", Case(partial(sharded, partial(program_of, "gpt2-124m"), node(MESHES[1]), **options))
    piped = {"layouts": LAYERS_OVER_PIPE, "pipeline": md.Pipeline(8), "overlap": True}
    yield "scan, 1f1b/pipe=4,data=2", Case(partial(sharded, _decoder, "pipe=4,data=2", **piped))


def _steps() -> Cases:
    lstm = partial(deep_steps.unrolled_lstm, steps=20, width=512, batch=256)
    for axes in ("data=4,model=2", "pod=2,data=2,model=2"):
        yield f"LSTM, 20 time steps/{axes}", Case(partial(sharded, lstm, node(axes)), axes == "data=4,model=2")
        yield f"named dims/{axes}", Case(partial(sharded, _named, node(axes)), True)
        yield f"loop that data ends/{axes}", Case(partial(sharded, _until_small, axes), axes == "data=4,model=2")
    yield "evaluation/data=4,model=2", Case(partial(sharded, _evaluation, "data=4,model=2"), True)
    small = partial(deep_steps.gradient_accumulation, layers=2, microbatches=4, width=512, batch=64)
    yield "4 microbatches written out/data=4,model=2", Case(partial(sharded, small, node("data=4,model=2")))
    pair = partial(deep_steps.encoder_decoder, layers=2, width=512, batch=64, length=128)
    yield "encoder and decoder/data=4,model=2", Case(partial(sharded, pair, node("data=4,model=2")))
    low = partial(deep_steps.low_rank_adapters, layers=2, width=1024, batch=16)
    yield "adapters/data=4,model=2", Case(partial(sharded, low, node("data=4,model=2")))


def _named() -> md.Program:
    """Returns attention and a perceptron on named dims, layers in ``md.scan``, under layout rules."""
    layers = {"query": "layers=4 embed=64 heads=4 head=16", "out": "layers=4 heads=4 head=16 embed=64"}
    layers |= {"up": "layers=4 embed=64 hidden=256", "down": "layers=4 hidden=256 embed=64"}
    params = {"embed": "vocab=256 embed=64", "layers": layers}
    params = jax.tree.map(lambda dims: md.named(unrolled.shape(*md.dims(dims).sizes), dims), params)
    tokens = md.named(jax.ShapeDtypeStruct((32, 16), jnp.int32), "batch=32 seq=16")

    def block(x: md.Tensor, layer: Any) -> tuple[md.Tensor, None]:
        query = md.dot(md.rms_norm(x, over="embed"), layer["query"], over="embed")
        key = md.rename(query, seq="key")
        weights = md.softmax(md.dot(query, key, over="head") / 4, over="key")
        x = x + md.dot(md.dot(weights, key, over="key"), layer["out"], over="heads head")
        hidden = md.gelu(md.dot(md.rms_norm(x, over="embed"), layer["up"], over="embed"))
        return x + md.dot(hidden, layer["down"], over="hidden"), None

    def loss(params: Any, tokens: md.Tensor) -> jax.Array:
        x, _ = md.scan(block, md.take(params["embed"], tokens, over="vocab"), params["layers"], over="layers")
        logits = md.dot(md.rms_norm(x, over="embed"), params["embed"], over="embed")
        return md.mean(md.cross_entropy(logits, tokens, over="vocab"), over="batch seq")

    return md.Program(_descent(loss), (params, tokens), rules="batch:data heads:model hidden:model")


def _until_small() -> md.Program:
    """Returns power iteration until the change is small."""

    def step(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        def again(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            v, _ = state
            new = w @ (v @ w).T
            new = (new / jnp.linalg.norm(new)).T
            return new, jnp.max(jnp.abs(new - v))

        return lax.while_loop(lambda state: state[1] > 1e-3, again, (x, jnp.float32(1)))

    return md.Program(step, (unrolled.shape(256, 256), unrolled.shape(64, 256)), {"x": "data=S(0)"})


def _evaluation() -> md.Program:
    """Returns an evaluation step: no output aliases an argument, and metrics reduce over the batch."""

    def evaluate(params: Any, batch: Any) -> dict[str, jax.Array]:
        logits = jax.nn.relu(batch["x"] @ params["up"]) @ params["down"]
        right = jnp.argmax(logits, -1) == batch["y"]
        return {"loss": unrolled.cross_entropy(logits, batch["y"]), "right": right.mean(), "worst": logits.min(0)}

    params = {"up": unrolled.shape(64, 512), "down": unrolled.shape(512, 16)}
    batch = {"x": unrolled.shape(256, 64), "y": jax.ShapeDtypeStruct((256,), jnp.int32)}
    return md.Program(evaluate, (params, batch), {"batch/*": "data=S(0)"})


def _unrolled() -> Cases:
    yield "GPT of 12 layers/data=8,model=8", Case(partial(sharded, partial(deep_gpt, 12), "data=8,model=8"), True)
    yield "GPT-3 of 48 layers/two axes", Case(partial(sharded, partial(unrolled.gpt3, 48), TWO))
    yield "GPT-3 175B/two axes, memory not limited", Case(partial(sharded, unrolled.gpt3, TWO, memory=UNLIMITED))
    for axes, mesh in (("two axes", TWO), ("three axes", THREE)):
        yield f"GPT-3 175B/{axes}", Case(partial(sharded, unrolled.gpt3, mesh))
        yield f"Llama 3 405B/{axes}", Case(partial(sharded, unrolled.llama3, mesh))
