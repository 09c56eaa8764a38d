"""Programs as text: a writer adds lines of ordinary JAX, and knows shape, dtype and size of what they define.

The text is what runs and what a failure prints, so a case can be copied into a file as it is.

Numbers are chosen so that two correct programs agree. Most inputs are small multiples of 1/4, and
the writer follows how large a value can be and of which power of two it is a multiple: as long as
all sums fit into the digits of its dtype, no order of summation rounds. Where a digit decides
(comparisons, sorting positions, whole numbers), only such *exact* values are used.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import meshdsl as md

T = TypeVar("T")
Draw = Callable[[int], int]  # a number below n

DIGITS = {"float32": 2.0**23, "bfloat16": 2.0**7, "complex64": 2.0**23}
LARGE = 1e4
NAMES = {"jax": jax, "jnp": jnp, "lax": lax, "md": md, "checkpoint_name": checkpoint_name}


@dataclass(frozen=True)
class Value:
    """An array that the text defines.

    Args:
      size: bound of its magnitude. quantum: it is a multiple of this; 0 if rounded.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    size: float = 1.0
    quantum: float = 0.0

    @property
    def exact(self) -> bool:
        """Whether every order of summation gives the same digits."""
        return self.dtype not in DIGITS or (self.quantum > 0 and self.size <= DIGITS[self.dtype] * self.quantum)

    @property
    def rank(self) -> int:
        return len(self.shape)

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Input:
    """An argument of the step, and what it holds: "quarters", "reals", "whole", "index", "bool" or "key"."""

    value: Value
    holds: str

    def array(self) -> jax.Array | np.ndarray:
        """Its elements, the same every time."""
        rng, shape = np.random.default_rng(int(self.value.name[1:])), self.value.shape
        made = {
            "quarters": lambda: rng.integers(-6, 7, shape) / 4,
            "reals": lambda: rng.normal(size=shape).clip(-3, 3),
            "whole": lambda: rng.integers(-3, 4, shape),
            "index": lambda: rng.integers(0, int(self.value.size) + 1, shape),
            "bool": lambda: rng.integers(0, 2, shape) > 0,
        }
        return jax.random.key(7) if self.holds == "key" else np.asarray(made[self.holds](), jnp.dtype(self.value.dtype))


@dataclass
class Writer:
    """A function that is being written; ``outer`` is the one around it."""

    draw: Draw
    dims: tuple[int, ...]
    mesh: md.Mesh
    differentiable: bool
    inputs: list[Input] = field(default_factory=list)
    outer: "Writer | None" = None
    lines: list[str] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    texts: dict[str, Value] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)
    count: list[int] = field(default_factory=lambda: [0])
    blocks: list[str] = field(default_factory=list)

    def inner(self) -> "Writer":
        """A function inside this one."""
        shared = {"count": self.count, "blocks": self.blocks}
        return Writer(self.draw, self.dims, self.mesh, self.differentiable, self.inputs, self, **shared)

    @property
    def depth(self) -> int:
        return 0 if self.outer is None else 1 + self.outer.depth

    # drawing

    def pick(self, items: Sequence[T]) -> T:
        return items[self.draw(len(items))]

    def number(self, low: int, high: int) -> int:
        return low + self.draw(high - low + 1)

    def chance(self, percent: int) -> bool:
        return self.draw(100) >= 100 - percent

    def shape(self, low: int, high: int) -> tuple[int, ...]:
        return tuple(self.pick(self.dims) for _ in range(self.number(low, high)))

    # values

    def visible(self) -> list[Value]:
        """What an expression here can name."""
        return self.values + (self.outer.visible() if self.outer else [])

    def find(self, fits: Callable[[Value], bool]) -> Value | None:
        """A value that fits; one of this function rather than one from outside."""
        own = [v for v in self.values if fits(v)]
        found = own if own and not self.chance(20) else [v for v in self.visible() if fits(v)]
        return self.pick(found[-6:]) if found else None

    def floats(self, low: int = 0, high: int = 4, more: Callable[[Value], bool] = lambda v: True) -> Value:
        """A float array with so many dims; a new input if there is none."""
        found = self.find(lambda v: v.dtype in ("float32", "bfloat16") and low <= v.rank <= high and more(v))
        return found or self.input(self.shape(max(low, 1), max(1, min(high, 3))))

    def exact(self, low: int = 0, high: int = 4) -> Value:
        """A value whose digits are the same in any order of summation; bools are not among them."""
        fits = self.find(lambda v: v.exact and v.dtype in ("float32", "int32") and low <= v.rank <= high)
        return fits or self.input(self.shape(max(low, 1), min(high, 3)), "quarters")

    def like(self, shape: tuple[int, ...], dtype: str = "float32") -> Value:
        """A value of this shape and dtype."""
        found = self.find(lambda v: v.shape == shape and v.dtype == dtype)
        holds = {"int32": "whole", "bool": "bool"}.get(dtype, "quarters")
        return found or self.input(shape, holds, dtype)

    def input(self, shape: tuple[int, ...], holds: str = "", dtype: str = "float32", size: float = 3.0) -> Value:
        """A new argument of the step."""
        holds = holds or ("reals" if self.chance(30) else "quarters")
        size, quantum = {"quarters": (1.5, 0.25), "reals": (3.0, 0.0)}.get(holds, (size, 1.0))
        value = Value(self._name("x"), shape, dtype, size, quantum)
        self.inputs.append(Input(value, holds))
        root = self
        while root.outer:
            root = root.outer
        root.values.insert(0, value)
        return value

    # text

    def write(self, text: str, *operands: Value, size: float = 1.0, quantum: float = 0.0) -> Value:
        """A line ``v = text``, with what is large scaled down; no line twice, as compilers merge them."""
        if text in self.texts:
            return self.texts[text]
        made = self._shaped(text, operands)
        if made.dtype in DIGITS and size > LARGE:
            scale = 2.0 ** -int(np.ceil(np.log2(size / 8)))
            text, size, quantum = f"({text}) * {scale}", size * scale, quantum * scale
        self.texts[text] = self.define(replace(made, size=size, quantum=quantum), text, operands)
        return self.texts[text]

    def define(self, value: Value, text: str, operands: Sequence[Value]) -> Value:
        """A line ``value = text``."""
        named = replace(value, name=self._name("v"))
        self.lines.append(f"{named} = {text}")
        self.use(operands)
        return self.keep(named)

    def keep(self, value: Value) -> Value:
        """A value that lines may name from here on."""
        digits = DIGITS.get(value.dtype)
        rounded = digits is not None and value.size > digits * value.quantum
        self.values.append(replace(value, quantum=0.0) if rounded else value)
        return self.values[-1]

    def use(self, operands: Sequence[Value]) -> None:
        self.used.update(v.name for v in operands)
        if self.outer:
            self.outer.use(operands)

    def fresh(self, prefix: str) -> str:
        """A name that nothing else has."""
        return self._name(prefix)

    def function(self, name: str, parameters: Sequence[str], body: "Writer", results: str) -> None:
        """``def name(parameters)`` with the lines of ``body``."""
        self.lines.append(f"def {name}({', '.join(parameters)}):")
        self.lines += [f"    {line}" for line in (*body.lines, f"return {results}")]

    def _name(self, prefix: str) -> str:
        self.count[0] += 1
        return f"{prefix}{self.count[0]}"

    def _shaped(self, text: str, operands: Sequence[Value]) -> Value:
        names = list(dict.fromkeys(v.name for v in operands))
        known = {v.name: v for v in operands}
        types = [abstract(known[name]) for name in names]
        made = jax.eval_shape(eval(f"lambda {', '.join(names)}: {text}", NAMES), *types)
        return Value("", tuple(made.shape), str(made.dtype))


def abstract(value: Value) -> jax.ShapeDtypeStruct:
    """Shape and dtype, keys included."""
    if value.dtype == "key":
        return jax.eval_shape(lambda: jax.random.key(0))
    return jax.ShapeDtypeStruct(value.shape, value.dtype)
