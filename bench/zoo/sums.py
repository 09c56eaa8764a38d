"""Checks the sums of the zoo's steps as XLA divides them: plain ``jax.jit``, the batch split over ``data``.

python -m bench.zoo.sums [case ...]

A step that is called wrong is run on the devices at hand: where its numbers are those of one device, it is a false
alarm. Each case runs in a process of its own.
"""

import argparse
import subprocess
import sys
import time
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from bench.report import versions
from bench.zoo.measure import CASES, MESH, build_case
from bench.zoo.peer import numbers_agree
from meshdsl.api.inspect import inspect
from meshdsl.errors import CheckError
from meshdsl.lowering.shardings import device_mesh


def main() -> None:
    """Checks the selected cases, and exits with 1 if there is a false alarm."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", metavar="case", help=f"of {', '.join(CASES)}; all by default")
    parser.add_argument("--in-process", action="store_true", help="check one case in this process")
    options = parser.parse_args()
    if options.in_process:
        jax.config.update("jax_num_cpu_devices", 8)
        sys.exit(checked(options.cases[0]))
    print(versions())
    statuses = {}
    for name in options.cases or CASES:
        statuses[name] = subprocess.run([sys.executable, "-m", "bench.zoo.sums", name, "--in-process"]).returncode
    failed = [f"{name}: exit status {status}" for name, status in statuses.items() if status]
    print("\n".join(failed) or f"no false alarm in {len(statuses)} cases")
    sys.exit(bool(failed))


def checked(name: str) -> bool:
    """Checks one case, says what came of it, and returns whether it is a false alarm."""
    case, start = build_case(name), time.process_time()
    program = case.program()
    devices = device_mesh(MESH)
    rows, whole = (
        NamedSharding(devices, spec) for spec in (PartitionSpec(*(None,) * case.dim, "data"), PartitionSpec())
    )
    *free, batch = program.args
    at: list[Any] = [jax.tree.map(lambda _: whole, x) for x in free] + [jax.tree.map(lambda _: rows, batch)]
    args = tuple(jax.device_put(x, each) for x, each in zip(program.args, at, strict=True))
    jitted = jax.jit(program.step)
    try:
        check = inspect(jitted, *args).check(raises=False)
    except CheckError as error:
        print(f"{name}: {error}", flush=True)
        return False
    print(f"{name}, {time.process_time() - start:.0f} s of a processor: {check}", flush=True)
    if check.equal:
        return False
    real = not numbers_agree(jitted(*program.args), jitted(*args))
    print(f"{name}: {'wrong on devices too' if real else 'FALSE ALARM'}", flush=True)
    return not real


if __name__ == "__main__":
    main()
