"""The text of a program and its fingerprint: the same in every process, different for different programs."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np

from meshdsl.ir.text import fingerprint, param_text, program_text
from meshdsl.trace import trace

X = jax.ShapeDtypeStruct((2, 3), jnp.float32)


def double_sum(x, xs):
    total, _ = jax.lax.scan(lambda c, s: (c + s, None), x, xs)
    return {"total": total * 2.0}


def program(step=double_sum, length=4):
    return trace(step, (X, jax.ShapeDtypeStruct((length, 2, 3), jnp.float32)))


def test_text():
    assert program_text(program()) == (
        "double_sum\n"
        "  in   x %0: float32[2,3]\n"
        "  in   xs %1: float32[4,2,3]\n"
        "  %5: float32[2,3] = scan %0 %1  length=4 num_carry=1 num_consts=0 reverse=False unroll=1\n"
        "    body x4: %2: float32[2,3] %3: float32[2,3]\n"
        "      %4: float32[2,3] = add %2 %3\n"
        "      return %4\n"
        "  %6: float32[2,3] = mul %5 float32(2.0)  out_dtype=None\n"
        "  return %6\n"
        "  out  total %6: float32[2,3]\n"
    )


def test_sources():
    line = double_sum.__code__.co_firstlineno
    text = program_text(program(), sources=True)
    assert f"  # forward test_text.py:{line + 2}\n" in text
    assert "/" not in text


def test_parameters():
    assert param_text({"b": np.ones((2, 3), np.int8), "a": (1,)}) == "{a: (1,), b: int8[2,3]}"
    assert param_text(np.float32(0.5)) == "0.5"
    assert param_text([np.float32, test_sources]) == "(float32, test_sources)"
    assert param_text((np.dtype("float32"), None, True, 1, 1.0, -0.0)) == "(dtype('float32'), None, True, 1, 1.0, -0.0)"
    assert "0x" not in param_text(object()) and "0x" not in param_text(lambda: 0)


def test_fingerprints():
    assert fingerprint(program()) == fingerprint(program())
    assert len(fingerprint(program())) == 64
    others = [program(length=5), program(lambda x, xs: x), program(lambda x, xs: x * 2), program(lambda x, xs: x * 3)]
    assert len({fingerprint(p) for p in [program(), *others]}) == 5


def test_fingerprint_in_another_process():
    code = "from tests.ir.test_text import *; print(fingerprint(program()))"
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert out.stdout.strip() == fingerprint(program())
