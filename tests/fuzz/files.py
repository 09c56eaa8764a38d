"""Mutated plan, topology and schedule files: each is read as it says, or is one error of meshdsl.

python -m tests.fuzz.files --cases 2000 --seed 0

A plan is changed as JSON: values of other types and sizes, entries that are missing, repeated or moved. Most are sealed
again, as someone who wants to deceive would do, so that more than the seals has to notice. Topologies and schedules are
changed as text. What is read is printed, drawn and compared, and its figures have to be consistent.
"""

import argparse
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax
import jax.numpy as jnp

import meshdsl as md
from meshdsl.layouts.topology import load_topology, topology_text
from meshdsl.plan.file import _seals
from meshdsl.plan.report import report_html
from meshdsl.schedules.schedule import Schedule

SLOW = 10.0  # seconds that no file may take
VALUES = (None, True, -1, 0, 1, 2**63, 10**30, 1e308, -1e300, 1e-320, 3.5, "", "x", "S(0)", "data", "a" * 5000, [], {})
DEEP = "[" * 100_000


def step(w: Any, batch: jax.Array) -> Any:
    """A step with collectives, reshards and a loop."""

    def loss(w: Any) -> jax.Array:
        hidden, _ = jax.lax.scan(lambda x, k: (jnp.tanh(x @ k), None), batch, w["layers"])
        return jnp.mean((hidden @ w["out"]) ** 2)

    return jax.tree.map(lambda a, g: a - 0.1 * g, w, jax.grad(loss)(w))


def originals(folder: Path) -> dict[str, str]:
    """The texts of a plan, a plan of a pipeline, a topology and a schedule."""
    w = {"layers": jnp.ones((4, 16, 16)), "out": jnp.ones((16, 16))}
    plain = md.parallelize(step, "data=2,model=2", {"batch": "data=S(0)"}, memory="1GB")
    piped = md.parallelize(
        step, "pipe=2,data=2", {"w/layers": "pipe=S(0)", "batch": "data=S(0)"}, pipeline=md.Pipeline(4)
    )
    texts = {}
    for name, sharded in (("plan", plain), ("pipeline", piped)):
        sharded.plan(w, jnp.ones((16, 16))).save(folder / "plan.json")
        texts[name] = (folder / "plan.json").read_text()
    texts["topology"] = topology_text(md.topology("tpu-v4"))
    texts["schedule"] = str(md.make_schedule("1f1b", ranks=2, microbatches=4))
    return texts


def mutated(kind: str, text: str, rng: random.Random) -> str:
    """Returns a changed text."""
    if kind in ("topology", "schedule"):
        return _changed_text(text, rng)
    if rng.random() < 0.05:
        return _changed_text(text, rng)
    content = json.loads(text)
    paths = [path for path in _paths(content) if path and path[0] != "seals"]
    for _ in range(rng.choice((1, 1, 1, 2))):
        _change(content, rng.choice(paths), paths, rng)
    if rng.random() < 0.8:
        content["seals"] = [list(seal) for seal in _seals(content)]
    return json.dumps(content)


def read(kind: str, file: Path, before: md.Plan) -> None:
    """Reads a file, and uses what it says."""
    if kind == "topology":
        topology = load_topology(file)
        str(topology), topology_text(topology)
        md.parallelize(jnp.sin, md.Mesh(topology=topology, data=2)).plan(jnp.ones(8))
    elif kind == "schedule":
        schedule = Schedule.load(file)
        assert Schedule.parse(str(schedule)) == schedule
    else:
        plan = md.load_plan(file)
        assert 0 <= plan.lower_bound <= plan.seconds * (1 + 1e-6) < float("inf")
        str(plan), str(plan.diff(before)), report_html(plan)


def judge(kind: str, text: str, file: Path, before: md.Plan) -> str:
    """Returns ``read``, ``error``, or what is wrong with how a file was read."""
    file.write_text(text)
    start = time.monotonic()
    try:
        read(kind, file, before)
        verdict = "read"
    except md.MeshDSLError:
        verdict = "error"
    except Exception as error:  # of any kind: the finding
        return f"{type(error).__name__}: {error}"
    return verdict if time.monotonic() - start < SLOW else f"{verdict} after {time.monotonic() - start:.0f} s"


def sweep(cases: int, seed: int, report: Callable[[str], None]) -> Counter[str]:
    """Judges files, reports what is wrong, and returns how many there were of each verdict."""
    verdicts: Counter[str] = Counter()
    with TemporaryDirectory() as name:
        folder = Path(name)
        texts = originals(folder)
        before = md.load_plan(folder / "plan.json")
        for i in range(cases):
            rng = random.Random(seed * 1_000_003 + i)
            kind = rng.choice((*texts, "plan"))
            verdict = judge(kind, mutated(kind, texts[kind], rng), folder / f"mutated-{kind}", before)
            verdicts[verdict if verdict in ("read", "error") else "wrong"] += 1
            if verdict not in ("read", "error"):
                report(f"case {i} of seed {seed}, {kind}: {verdict}")
    return verdicts


def _paths(x: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    for key, value in x.items() if isinstance(x, dict) else enumerate(x) if isinstance(x, list) else ():
        yield from _paths(value, (*path, key))


def _get(x: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        x = x[key]
    return x


def _change(content: Any, path: tuple[Any, ...], paths: list[tuple[Any, ...]], rng: random.Random) -> None:
    try:
        parent, key = _get(content, path[:-1]), path[-1]
        value = parent[key]
        copied = json.loads(json.dumps(_get(content, rng.choice(paths))))
    except (LookupError, TypeError):  # gone by an earlier change
        return
    number = isinstance(value, int | float) and not isinstance(value, bool)
    near = (value + 1, value - 1, -value, value * 2, value * 1000) if number else VALUES
    change = rng.choice(("value", "near", "near", "remove", "copy", "repeat"))
    if change == "remove":
        del parent[key]
    elif change == "repeat" and isinstance(parent, list):
        parent.append(json.loads(json.dumps(value)))
    else:
        parent[key] = copied if change == "copy" else rng.choice(near if change == "near" else VALUES)


def _changed_text(text: str, rng: random.Random) -> str:
    at = rng.randrange(len(text))
    lines = text.splitlines()
    row = rng.randrange(len(lines))
    changes: tuple[Callable[[], str], ...] = (
        lambda: text[:at],
        lambda: text[:at] + rng.choice("0159-+.eE,;[]{}\"'=#\n\0é∞") + text[at + 1 :],
        lambda: text[:at] + rng.choice(("nan", "inf", "-1", "1e400", "99999999999999999999", DEEP)) + text[at + 1 :],
        lambda: "\n".join([*lines[:row], *lines[row + 1 :]]),
        lambda: "\n".join([*lines[:row], lines[row], lines[row], *lines[row + 1 :]]),
        lambda: "\n".join(rng.sample(lines, len(lines))),
        lambda: text.replace(*(str(n) for n in rng.sample(range(10), 2))),
    )
    return rng.choice(changes)()


def main() -> None:
    """Runs the sweep; the exit status is 1 if anything was wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    verdicts = sweep(options.cases, options.seed, print)
    print(", ".join(f"{count} {verdict}" for verdict, count in sorted(verdicts.items())))
    raise SystemExit(bool(verdicts["wrong"]))


if __name__ == "__main__":
    main()
