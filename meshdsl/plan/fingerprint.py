"""The fingerprint of a traced program: equal for equal programs, in every process.

It covers the operations with their parameters, operands and results, the paths, shapes and
dtypes at the boundary. It leaves out source lines and the contents of arrays: neither changes
which plan is valid.
"""

import re
from collections.abc import Iterator
from functools import cache
from hashlib import sha256
from typing import Any

from meshdsl.ir import Graph, Literal, Op, Program, Value

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def fingerprint(program: Program) -> str:
    """Sixteen bytes of SHA-256 of the program, in hex."""
    digest = sha256()
    for leaf in (*program.inputs, *program.outputs):
        digest.update(f"{leaf.path} {leaf.dtype}{leaf.shape}\n".encode())
    for line in _lines(program.graph):
        digest.update(f"{line}\n".encode())
    return digest.hexdigest()[:32]


def _lines(graph: Graph) -> Iterator[str]:
    yield f"graph {' '.join(map(_defined, graph.inputs))}"
    for op in graph.ops:
        yield _line(op)
        for body in op.bodies:
            yield from _lines(body)


def _line(op: Op) -> str:
    params = " ".join(f"{name}={_text(op.params[name])}" for name in sorted(op.params))
    return f"{op.id} {op.name} {params} {' '.join(map(_operand, op.inputs))} -> {' '.join(map(_defined, op.outputs))}"


def _operand(x: Value | Literal) -> str:
    return f"%{x.id}" if isinstance(x, Value) else f"{_text(x.value)}:{_name(x.dtype)}"


def _defined(value: Value) -> str:
    return f"%{value.id}:{_name(value.dtype)}{value.shape}"


@cache
def _name(dtype: Any) -> str:
    return str(dtype)


def _text(value: Any) -> str:
    """A parameter as text that is the same in every process."""
    if hasattr(value, "shape") and hasattr(value, "dtype") and value.shape:
        return f"{value.dtype}{value.shape}"
    if callable(value):
        return getattr(value, "__qualname__", type(value).__qualname__)
    return _ADDRESS.sub("", repr(value))
