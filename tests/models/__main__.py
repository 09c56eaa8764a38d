"""Run every strategy of every family of models, at tiny sizes: numbers and collectives.

JAX_NUM_CPU_DEVICES=8 python -m tests.models gpt llama
"""

import argparse
import time

import jax

from tests.models.test_strategies import FAMILIES, PLANNED, run
from tests.quick_compiles import compile_quickly


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("family", nargs="*", choices=FAMILIES, help="default: all")
    asked = parser.parse_args().family
    compile_quickly()
    for family, strategy in PLANNED:
        if family in (asked or FAMILIES):
            begun = time.time()
            run(family, strategy)
            jax.clear_caches()
            print(
                f"{family} {strategy}: as planned, with the unsharded numbers ({time.time() - begun:.0f} s)", flush=True
            )


if __name__ == "__main__":
    main()
