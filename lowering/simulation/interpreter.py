"""A module of HLO run on simulated devices, all of them at once.

Every array has a first dim for the devices, of length 1 where all hold the same; tuples are tuples. Operations are
functions of arrays (``pointwise``, ``shaping``, ``contraction``, ``windows``, ``indexing``, ``exchange``); here are
control flow and calls. What no function knows becomes an ``Unfollowed`` value, and so does all that depends on it:
everything else is still computed.

Computations of scalars that reductions, scatters and sorts name are run on whole arrays of such scalars.

What is computed from constants alone is rounded to its type, as compilers do that fold it: ``1 - (-0.9961)`` is 2 in
bfloat16. Of two programs that are compared, only one may have it folded; so neither is run on exact constants.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from math import prod
from typing import Any

import numpy as np

from meshdsl.lowering.hlo.parse import Instruction, Module, arrays, members
from meshdsl.lowering.simulation.numbers import Array, Numbers, Reals
from meshdsl.lowering.simulation.operation import Operation, Unreadable, float_type, kind_of

Value = Any  # an array of all devices, a tuple of values, or Unfollowed; within a computation a Constant, too
Function = Callable[..., Value]
Observer = Callable[[str, Operation, Value], None]
_PER_LINE = 100  # elements that take as long as one line of a loop body, however small
_CALLS = {"call": "to_apply", "fusion": "calls", "async-start": "calls", "map": "to_apply"}
_FORWARDED = ("copy", "copy-start", "async-update", "opt-barrier", "optimization-barrier")
SHARD_MAP_ENDS = ("xla.sdy.GlobalToLocalShape", "xla.sdy.LocalToGlobalShape")  # each operand is on its own
_IDENTITIES = (
    *("Sharding", "LayoutConstraint", "xla.sdy.FuncResultSharding"),
    *("annotate_device_placement", "MoveToHost", "MoveToDevice"),
)
_FOLDED = frozenset(
    "add subtract multiply divide negate abs sign maximum minimum power sqrt rsqrt exponential log tanh convert "
    "compare select and or not".split()
)
_SPREAD = frozenset(("broadcast", "reshape", "bitcast", "transpose", "slice"))  # their result has the operand's number
_FOLDS = _FOLDED | _SPREAD


@dataclass(frozen=True)
class Constant:
    """A value all of whose elements are one number that depends on no argument.

    Args:
      array: of all devices.
      number: the number, of length 1: a float as float64, rounded to its type.
    """

    array: Array
    number: Array


@dataclass(frozen=True)
class Unfollowed:
    """A value that could not be computed.

    Args:
      operation: the first one on the way that could not be followed. reason: why.
    """

    operation: Operation
    reason: str


class TooLarge(Exception):
    """A program computes more elements than allowed."""


class Devices:
    """Simulated devices that run a module.

    Args:
      module: to run.
      count: the number of devices.
      numbers: what floats are.
      functions: operations by opcode.
      limit: elements that may be computed in all; a multiply-add of a product counts as a hundredth of one.
      observer: is told every operation and its value, outside of computations of scalars.
      bodies: computations that are ready to be run, by name; those that are lacking are added.
    """

    def __init__(
        self,
        module: Module,
        count: int,
        numbers: Numbers,
        functions: Mapping[str, Function],
        limit: float,
        observer: Observer | None = None,
        bodies: "dict[str, Body] | None" = None,
    ) -> None:
        self.module, self.count, self.numbers = module, count, numbers
        self._functions, self._left, self._observer = functions, limit, observer
        self._scalars = 0  # nested computations of scalars
        self._bodies = {} if bodies is None else bodies
        self.combiner = cache(self._combiner)

    def run(self, args: Sequence[Value]) -> Value:
        """Returns the results of the entry for arguments, in the order of its parameters."""
        with np.errstate(all="ignore"):
            return self.call(self.module.entry, args)

    def call(self, name: str, args: Sequence[Value]) -> Value:
        """Returns the results of a computation."""
        return _plain(self._run(name, args))

    def _run(self, name: str, args: Sequence[Value]) -> Value:
        body = self.body(name)
        values: dict[str, Value] = {}
        for at, operation in enumerate(body.operations):
            if operation.opcode == "parameter":
                value = args[int(operation.instruction.rest.split(")")[0])]
            else:
                value = self._value(operation, [values[operand] for operand in body.reads[at]])
            values[operation.name] = value
            if self._observer is not None and not self._scalars:
                self._observer(name, operation, _plain(value))
            for dead in body.dead[at]:
                del values[dead]
        return values[body.root]

    def scalars(self, name: str, args: Sequence[Value]) -> Value:
        """Returns the results of a computation of scalars for arrays of them."""
        self._scalars += 1
        try:
            found = self.call(name, args)
        finally:
            self._scalars -= 1
        for each in found if isinstance(found, tuple) else (found,):
            if isinstance(each, Unfollowed):
                raise Unreadable(f"{each.operation.opcode} in {name}: {each.reason}")
        return found

    def charge(self, elements: float) -> None:
        """Counts elements to be computed.

        Raises:
          TooLarge: they are more than allowed.
        """
        self._left -= elements
        if self._left < 0:
            raise TooLarge

    def _constant(self, operation: Operation) -> Value:
        """Returns the value of a constant, for all devices."""
        literal = operation.literal
        if literal.ndim == 0 and operation.kind != "complex":
            return self._spread(literal[None], operation)
        return (self.numbers.of(literal) if operation.kind == "float" else literal)[None]

    def _spread(self, number: Array, operation: Operation) -> Constant:
        """Returns an array of one number of the operation's type, for all devices."""
        if operation.kind == "float":
            number = number.astype(float_type(operation.type.dtype)).astype(np.float64)
        element = self.numbers.of(number) if operation.kind == "float" else number
        return Constant(np.full((1, *operation.type.dims), element), number)

    def _folded(self, operation: Operation, args: Sequence[Value]) -> Constant | None:
        """Returns the value of an operation on constants alone; None if it is none."""
        opcode = operation.opcode
        if opcode not in _FOLDS or not args or not all(isinstance(x, Constant) for x in args):
            return None
        if {operation.kind, *operation.kinds} - {"float", "int", "bool"} or len(operation.types) != 1:
            return None
        numbers = [x.number for x in args]
        found = numbers[0] if opcode in _SPREAD else self._functions[opcode](self._rounding, operation, *numbers)
        return self._spread(np.asarray(found), operation)

    @cached_property
    def _rounding(self) -> "Devices":
        """Devices that compute constants."""
        return Devices(self.module, 1, Reals(), self._functions, np.inf)

    # ---- One operation -----------------------------------------------------------------------------------------------

    def _value(self, operation: Operation, args: list[Value]) -> Value:
        opcode = operation.opcode
        if opcode in _FORWARDED or opcode.endswith("-done"):
            return args[0]
        if opcode in _CALLS:
            return self._run(operation.computation(_CALLS[opcode]), args)
        folded, args = self._folded(operation, args), list(map(_plain, args))
        if folded is not None:
            return folded
        if opcode == "tuple":
            return tuple(args)
        unknown = next((x for x in args if isinstance(x, Unfollowed)), None)
        if unknown is not None and operation.attributes.get("custom_call_target", "").strip('"') not in SHARD_MAP_ENDS:
            return unknown
        try:
            if opcode == "get-tuple-element":
                return args[0][operation.integer("index")]
            if opcode == "while":
                return self._while(operation, args[0])
            if opcode == "conditional":
                return self._conditional(operation, args)
            if opcode == "constant":
                return self._constant(operation)
            if opcode == "custom-call" and operation.attributes["custom_call_target"].strip('"') in _IDENTITIES:
                return args[0]
            function = self._functions.get(opcode.removesuffix("-start"))
            if function is None:
                raise Unreadable("unknown to the interpreter")
            if not self._scalars:
                self.charge(sum(prod(x.dims) for x in operation.types) * self._devices_of(args))
            return function(self, operation, *args)
        except Unreadable as error:
            return Unfollowed(operation, str(error))
        except (KeyError, IndexError, ValueError) as error:  # an attribute, or shapes, of a form that is not known
            return Unfollowed(operation, f"{type(error).__name__}: {error}")

    @staticmethod
    def _devices_of(args: Sequence[Value]) -> int:
        return max((len(x) for x in args if isinstance(x, np.ndarray)), default=1)

    def _while(self, operation: Operation, state: Value) -> Value:
        body, condition = operation.computation("body"), operation.computation("condition")
        while True:
            go = self.call(condition, (state,))
            if isinstance(go, Unfollowed):
                return go
            if go.all() != go.any():
                raise Unreadable("devices leave the loop in different iterations")
            if not go.any():
                return state
            state = self.call(body, (state,))
            self.charge(_PER_LINE * len(self.module.computations[body]))

    def _conditional(self, operation: Operation, args: Sequence[Value]) -> Value:
        named = operation.attributes
        if "branch_computations" in named:
            branches = [name.strip().lstrip("%") for name in named["branch_computations"].strip("{}").split(",")]
            which = np.where((args[0] < 0) | (args[0] >= len(branches)), len(branches) - 1, args[0])
        else:
            branches = [operation.computation("true_computation"), operation.computation("false_computation")]
            which = np.where(args[0], 0, 1)
        taken = sorted(set(which.tolist()))
        found = {i: self.call(branches[i], (args[1 + i],)) for i in taken}
        if len(taken) == 1:
            return found[taken[0]]
        if any(line.opcode.startswith(("all-", "reduce-scatter", "collective")) for i in taken for line in
               self.module.computations[branches[i]]):  # fmt: skip
            raise Unreadable("devices take different branches, and one of them communicates")
        return _chosen(which, found)

    # ---- Computations ------------------------------------------------------------------------------------------------

    def body(self, name: str) -> "Body":
        """Returns a computation, ready to be run."""
        if name not in self._bodies:
            self._bodies[name] = Body.of(self.module, name)
        return self._bodies[name]

    def _combiner(self, name: str) -> str:
        """The opcode of a computation that combines two scalars by one operation; ``first``, ``second``, or none."""
        lines = {line.name: line for line in self.module.computations[name]}

        def origin(at: str) -> str:
            while lines[at].opcode in ("copy", "bitcast") or is_widened(lines[at]):
                at = lines[at].operands[0]
            return at

        def is_widened(line: Instruction) -> bool:  # numbers are not rounded, so short floats are wide ones
            return line.opcode == "convert" and {kind(line), kind(lines[line.operands[0]])} == {"float"}

        def kind(line: Instruction) -> str:
            return kind_of(arrays(line.type)[0].dtype)

        root = lines[origin(self.body(name).root)]
        if root.opcode == "parameter":
            return {"0": "first", "1": "second"}.get(root.rest.split(")")[0], "")
        ends = [lines[origin(operand)] for operand in root.operands]
        if [end.opcode for end in ends] != ["parameter"] * 2 or len({end.name for end in ends}) != 2:
            return ""
        return root.opcode


@dataclass(frozen=True)
class Body:
    """A computation, ready to be run.

    Args:
      operations: in order. reads: per operation, the names of its operands. dead: per operation, the values that
        nothing reads after it. root: the name of the result.
    """

    operations: tuple[Operation, ...]
    reads: tuple[tuple[str, ...], ...]
    dead: tuple[tuple[str, ...], ...]
    root: str

    @classmethod
    def of(cls, module: Module, name: str) -> "Body":
        """Returns a computation of a module."""
        lines = {line.name: line for line in _with_parts(module.computations[name])}
        reads = tuple(() if x.opcode in ("constant", "parameter") else x.operands for x in lines.values())
        operations = tuple(
            Operation(line, tuple(lines[operand] for operand in read))
            for line, read in zip(lines.values(), reads, strict=True)
        )
        root = module.roots.get(name, operations[-1].name)
        last = {x.name: at for at, x in enumerate(operations)}
        last.update({operand: at for at, read in enumerate(reads) for operand in read})
        dead: list[list[str]] = [[] for _ in operations]
        for each, at in last.items():
            if each != root:
                dead[at].append(each)
        return cls(operations, reads, tuple(map(tuple, dead)), root)


def _plain(value: Value) -> Value:
    return value.array if isinstance(value, Constant) else value


def _with_parts(lines: Sequence[Instruction]) -> Iterator[Instruction]:
    """The instructions, with one more for each operand ``%sort.21#1``, which is a part of a tuple."""
    known = dict[str, Instruction]()
    for line in lines:
        for operand in line.operands if line.opcode not in ("constant", "parameter") else ():
            if "#" in operand and operand not in known:
                whole, _, index = operand.rpartition("#")
                part = members(known[whole].type)[int(index)].strip()
                known[operand] = Instruction(operand, part, "get-tuple-element", f"{whole}), index={index}")
                yield known[operand]
        known[line.name] = line
        yield line


def _chosen(which: Array, found: Mapping[int, Value]) -> Value:
    """Per device, the value of the branch that it takes."""
    values = list(found.values())
    if unknown := next((x for x in values if isinstance(x, Unfollowed)), None):
        return unknown
    if isinstance(values[0], tuple):
        parts = zip(*values, strict=True)
        return tuple(_chosen(which, dict(zip(found, part, strict=True))) for part in parts)
    made = values[0]
    for i, value in list(found.items())[1:]:
        made = np.where((which == i).reshape(-1, *[1] * (value.ndim - 1)), value, made)
    return made
