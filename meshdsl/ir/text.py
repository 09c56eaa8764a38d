"""The text of a program, equal in every process: it contains no addresses and no paths.

    step
      in   params/w1 %0: float32[512,1024]
      %3: float32[256,1024] = dot_general %2 %0  dimension_numbers=(((1,), (0,)), ((), ()))
      %9: float32[4,4] = scan %5 %6  length=8 num_carry=1 num_consts=0 reverse=False
        body x8: %7: float32[4,4] %8: float32[4]
          ...
      out  0 %9

The fingerprint is a hash of this text. The text of an array is its shape and dtype, and names and source lines are left
out: none of these changes which plans are valid.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from hashlib import sha256
from types import NoneType
from typing import Any

import numpy as np

from meshdsl.ir.graph import Graph, Leaf, Literal, Op, TracedProgram, Value
from meshdsl.util.lazy import memoize_by_object

_PLAIN = (NoneType, bool, int)
_ADDRESS = re.compile(r"(?: at)? 0x[0-9a-fA-F]+")
_WEAK = re.compile(r" weak_type=(True|False)")
_str, _repr = cache(str), cache(repr)  # of dtypes: numpy computes them anew each time


def program_text(program: TracedProgram, sources: bool = False) -> str:
    """Returns the program as text, one line per input, operation and output.

    Args:
      sources: append the phase and the user's line to every operation.
    """
    return "\n".join((program.name, *_framed(program, _lines(program.graph, "  ", sources)))) + "\n"


def fingerprint(program: TracedProgram) -> str:
    """Returns the SHA-256 of the program's text without its name, in hex: equal for equal programs."""
    return sha256(_text(program).encode()).hexdigest()


def is_equal_but_weak(program: TracedProgram, other: TracedProgram) -> bool:
    """Returns whether two programs are equal but for weak types, so that a plan of one is a plan of the other."""
    a, b = ([(x.path, x.shape, x.dtype, x.dims) for x in each.inputs] for each in (program, other))
    return a == b and _WEAK.sub("", _text(program)) == _WEAK.sub("", _text(other))


def _text(program: TracedProgram) -> str:
    return "\n".join(_framed(program, _graph_lines(program.graph))) + "\n"


@memoize_by_object
def _graph_lines(graph: Graph) -> tuple[str, ...]:
    return tuple(_lines(graph, "  ", False))


def _framed(program: TracedProgram, lines: Iterable[str]) -> Iterator[str]:
    """The lines of a program's graph between those of its inputs and outputs."""
    yield from (f"  in   {_named(leaf, x)}" for leaf, x in zip(program.inputs, program.graph.inputs, strict=True))
    yield from lines
    yield from (f"  out  {_named(leaf, x)}" for leaf, x in zip(program.outputs, program.graph.returned, strict=True))


def _lines(graph: Graph, indent: str, sources: bool) -> Iterator[str]:
    for op in graph.ops:
        where = f"  # {op.phase} {op.source}" if sources else ""
        yield indent + _line(op) + where
        for body in op.bodies:
            inputs = " ".join(map(_typed, body.inputs))
            yield f"{indent}  body x{'~' * body.estimated}{body.trips}: {inputs}".rstrip()
            yield from _lines(body, indent + "    ", sources)


def _line(op: Op) -> str:
    made = " ".join([_typed(x) for x in op.outputs])
    params = " ".join([f"{name}={param_text(op.params[name])}" for name in sorted(op.params)])
    params = " ".join([params, f"manual={param_text(op.manual)}"]).strip() if op.manual else params
    operation = " ".join([op.name, *[f"%{x.id}" if isinstance(x, Value) else _atom(x) for x in op.inputs]])
    return (f"{made} = " if made else "") + operation + (f"  {params}" if params else "")


def _named(leaf: Leaf, x: Value | Literal) -> str:
    value = _typed(x) if isinstance(x, Value) else _atom(x)
    return f"{leaf.path} {value}".strip()


def _atom(x: Value | Literal) -> str:
    return f"%{x.id}" if isinstance(x, Value) else f"{_str(x.dtype)}({param_text(x.value)})"


def _typed(x: Value) -> str:
    return f"%{x.id}: {_type(x.dtype, x.shape)}"


@cache
def _type(dtype: Any, shape: tuple[int, ...]) -> str:
    return f"{_str(dtype)}[{','.join(map(str, shape))}]"


def param_text(x: Any) -> str:
    """Returns a parameter as text: functions by name, arrays by shape and dtype, without addresses."""
    if type(x) in _PLAIN:
        return repr(x)
    if type(x) in (tuple, list):
        parts = [str(each) if type(each) is int else param_text(each) for each in x]
        return "(" + ", ".join(parts) + ("," if len(x) == 1 else "") + ")"
    if isinstance(x, np.generic):
        return repr(x.item())
    if isinstance(x, np.dtype):
        return _repr(x)
    if isinstance(x, Mapping):
        return "{" + ", ".join(f"{name}: {param_text(x[name])}" for name in sorted(x, key=str)) + "}"
    if isinstance(x, type) or (callable(x) and hasattr(x, "__qualname__")):
        return str(x.__qualname__)
    if hasattr(x, "shape") and hasattr(x, "dtype"):
        return f"{x.dtype}[{','.join(map(str, x.shape))}]"
    return _ADDRESS.sub("", repr(x)).replace("\n", " ")
