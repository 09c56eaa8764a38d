"""A compiled program checked against the step that it was compiled from, result by result, without running it.

    partitioned    what the partitioner makes of the step, in exact arithmetic (``numbers.PrimeField``)
    lowered        a planned program, which says itself what every device runs: the same, beside the unsharded step
    optimized      what runs, in float64, up to rounding

Both are run on simulated devices, on random inputs. A result that agrees everywhere in the first is the step's, but for
a chance of about the degree of its expression over 2**31, and for comparisons that come out otherwise for other inputs;
where exact arithmetic cannot follow (complex numbers), float64 is used as well, and so it is for results of a planned
program that differ in exact arithmetic: planners use laws that hold for floats alone, such as that none is above the
largest one. For a result that differs, the operation that makes it wrong is looked for.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cache, cached_property
from math import prod
from pathlib import PurePath
from typing import Any

import numpy as np

from meshdsl.errors import CheckError
from meshdsl.ir.graph import Source
from meshdsl.layouts.layout import Layout
from meshdsl.layouts.mesh import Mesh
from meshdsl.lowering.hlo.flops import product_flops
from meshdsl.lowering.hlo.parse import Module, arrays, executed, parse_module
from meshdsl.lowering.hlo.source import InstructionSources
from meshdsl.lowering.partitioner import CompiledModules
from meshdsl.lowering.simulation.comparison import ProgramPair, ResultCheck
from meshdsl.lowering.simulation.contraction import PRODUCT_COST
from meshdsl.lowering.simulation.faults import FaultFinder, FaultyOperation
from meshdsl.lowering.simulation.interpreter import TooLarge, Unfollowed
from meshdsl.lowering.simulation.numbers import Numbers, PrimeField, Reals
from meshdsl.lowering.simulation.operation import Operation, Unreadable
from meshdsl.lowering.simulation.types import ObservedTypes, Recording

LIMIT = 1e9  # elements that are computed for one input; about a minute
_PASSED_ON = ("parameter", "get-tuple-element", "copy", "bitcast", "call", "while", "conditional", "fusion")
_SLACK = 2  # values that all devices share are computed once
_FEW = 2  # bound of integers that are indices within any array
_HOW = {"partitioned": "in exact arithmetic", "lowered": "in exact arithmetic", "optimized": "as optimized"}  # by stage


class TooManyElementsError(CheckError):
    """A program computes more elements than simulated devices may."""


@dataclass(frozen=True)
class CompiledFault:
    """An operation of a compiled program that makes results wrong.

    Args:
      kind: ``missing reduction``, ``doubled reduction``, ``reduction over other axes``, ``blocks of other devices``, or
        ``another value``.
      operation: its opcode. axes: mesh axes of the collective, or of the partial sum.
      place: line of the user's program.
      text: what it does, in types of its operands and result.
      stage: the program in which it is: ``partitioned`` or ``optimized``.
      results: paths of the results that it makes wrong.
    """

    kind: str
    operation: str
    axes: tuple[str, ...]
    place: Source
    text: str
    stage: str
    results: tuple[str, ...]


@dataclass(frozen=True)
class UnfollowedOperation:
    """An operation that simulated devices cannot run.

    Args:
      operation: its opcode. place: line of the user's program. reason: why. stage: of the program that has it.
      results: paths of the results that depend on it, and are not checked.
    """

    operation: str
    place: Source
    reason: str
    stage: str
    results: tuple[str, ...]


@dataclass(frozen=True)
class ProgramCheck:
    """A compiled program beside the step that it was compiled from.

    Args:
      name: of the step. mesh: of its devices.
      results: how many it has. inputs: random ones that were tried.
      stages: programs that were run: ``partitioned`` or ``lowered``, ``optimized``.
      agreeing: paths of the results that agree in all of them.
      faults: operations that make results wrong.
      unfollowed: operations that could not be followed.
    """

    name: str
    mesh: Mesh
    results: int
    inputs: int
    stages: tuple[str, ...]
    agreeing: tuple[str, ...]
    faults: tuple[CompiledFault, ...]
    unfollowed: tuple[UnfollowedOperation, ...]

    @property
    def equal(self) -> bool:
        """Whether no result is known to be wrong."""
        return not self.faults

    @property
    def facts(self) -> dict[str, Any]:
        """All figures as plain values, as ``meshdsl inspect --check --json`` prints them."""
        rows: list[CompiledFault | UnfollowedOperation] = [*self.faults, *self.unfollowed]
        found = [
            {name: x for name, x in asdict(each).items() if name != "place"} | {"source": _place(each.place)}
            for each in rows
        ]
        wrong = len(self.faults)
        return {"agreeing": list(self.agreeing), "faults": found[:wrong], "unfollowed": found[wrong:]}

    def __str__(self) -> str:
        head = f"{self.name} on mesh {self.mesh}: {len(self.agreeing)} of {self.results} results agree with the step"
        how = " and ".join(_HOW[stage] for stage in self.stages)
        lines = [f"{head}, {how}, for {self.inputs} input{'s' * (self.inputs != 1)}"]
        for fault in self.faults:
            lines.append(f"wrong: {', '.join(fault.results)}")
            over = f" over {','.join(fault.axes)}" if fault.axes else ""
            lines.append(f"  {fault.kind}: {fault.operation}{over} of {_place(fault.place)} ({fault.stage} program)")
            lines.append(f"    {fault.text}")
        return "\n".join([*lines, *self.left_open])

    @property
    def left_open(self) -> list[str]:
        """Lines on the results that are not checked."""
        lines = []
        for each in self.unfollowed:
            lines.append(f"not followed: {', '.join(each.results)}")
            where = f"{each.operation} of {_place(each.place)} ({each.stage} program)"
            lines.append(f"  {where}: {each.reason}")
        return lines


def _place(source: Source) -> str:
    return f"{PurePath(source.file).name}:{source.line}" if source.file else "?"


@dataclass(frozen=True)
class TypedValue:
    """A value of a partitioned program.

    Args:
      operation: the opcode that computes it. place: line of the user's program.
      tensor: type of one device's part, ``float32[8,64]``.
      layout: under which it is a value of the step; None if it is none, such as a piece of a block on its way.
    """

    operation: str
    place: Source
    tensor: str
    layout: Layout | None


def typed_values(name: str, modules: CompiledModules, mesh: Mesh, limit: float = LIMIT) -> list[TypedValue]:
    """Return every value of a partitioned program that depends on arguments, in order; those of loops once.

    Raises:
      CheckError: the program is too large to be run here, or cannot be.
    """
    pair = ProgramPair(parse_module(modules.whole), parse_module(modules.partitioned), mesh.size)
    stage = _Stage("partitioned", modules.partitioned, pair, mesh, 1, limit)
    with _said(name, mesh, limit):
        return list(stage.typed())


def check_program(
    name: str, modules: CompiledModules, mesh: Mesh, paths: Sequence[str], inputs: int = 2, limit: float = LIMIT
) -> ProgramCheck:
    """Return which results of a compiled program are those of the step.

    Args:
      name: of the step.
      modules: its program before and after the partitioner, and as it runs; an empty one is left out.
      mesh: of its devices. paths: of its results.
      inputs: random ones that are tried. limit: elements that may be computed for each.

    Raises:
      CheckError: the program is too large to be run here.
    """
    whole, texts = parse_module(modules.whole), {"partitioned": modules.partitioned, "optimized": modules.optimized}
    stages = [
        _Stage(stage, text, ProgramPair(whole, parse_module(text), mesh.size), mesh, inputs, limit)
        for stage, text in texts.items()
        if text
    ]
    return _checked(name, stages, mesh, paths, inputs, limit)


@dataclass(frozen=True)
class PlannedModules:
    """The HLO texts of a step and of the planned program that was made of it.

    Args:
      step: the unsharded step, as it is lowered for one device.
      lowered: the planned program, before any compiler has changed it.
      optimized: the same as it runs; empty if it is not compiled.
      kept: the arguments of the step that the planned program takes.
      given: arguments that are not random, by their places: integers and truth values, which may be indices.
    """

    step: str
    lowered: str
    optimized: str
    kept: tuple[int, ...]
    given: Mapping[int, np.ndarray]


def check_planned(
    name: str, modules: PlannedModules, mesh: Mesh, paths: Sequence[str], inputs: int = 1, limit: float = LIMIT
) -> ProgramCheck:
    """Return which results of a planned program are those of the unsharded step; arguments are as in ``check_program``.

    Raises:
      CheckError: the program is too large to be run here.
    """
    step, lowered = parse_module(modules.step), parse_module(modules.lowered)
    with _said(name, mesh, limit):
        if mesh.size * _elements(lowered) > _SLACK * limit:
            raise TooLarge
    pair = ProgramPair(step, lowered, mesh.size, None, modules.kept, modules.given)
    stages = [_Stage("lowered", modules.lowered, pair, mesh, inputs, limit, modules.step)]
    if modules.optimized:
        pair = ProgramPair(step, parse_module(modules.optimized), mesh.size, lowered, modules.kept, modules.given)
        stages.append(_Stage("optimized", modules.optimized, pair, mesh, inputs, limit, modules.step))
    return _checked(name, stages, mesh, paths, inputs, limit)


def _elements(module: Module) -> float:
    """Elements that a device computes, before it runs; those of loops of an unknown number of iterations once."""
    sites = executed(module, lambda line: line.opcode not in (*_PASSED_ON, "tuple", "custom-call"))
    made = sum(prod(x.dims) * site.trips for site in sites for x in arrays(site.instruction.type))
    return made + product_flops(module) / 2 * PRODUCT_COST


def _checked(
    name: str, stages: "Sequence[_Stage]", mesh: Mesh, paths: Sequence[str], inputs: int, limit: float
) -> ProgramCheck:
    faults, verdicts, known = list[CompiledFault](), list[list[str]](), set[int]()
    with _said(name, mesh, limit):
        for stage in stages:
            verdicts.append(stage.verdicts(len(paths)))
            wrong = [i for i, verdict in enumerate(verdicts[-1]) if verdict == "wrong" and i not in known]
            faults += stage.faults(paths, wrong)
            known.update(wrong)
    agreeing = [path for path, *both in zip(paths, *verdicts, strict=True) if set(both) == {"agrees"}]
    unfollowed = [each for stage in stages for each in stage.unfollowed(paths)]
    names = tuple(stage.name for stage in stages)
    return ProgramCheck(name, mesh, len(paths), inputs, names, tuple(agreeing), tuple(faults), tuple(unfollowed))


@contextmanager
def _said(name: str, mesh: Mesh, limit: float) -> Iterator[None]:
    """Programs that cannot be run, in words of the user."""
    try:
        yield
    except TooLarge as error:
        raise TooManyElementsError(
            f"{name} computes more than {limit:.0e} elements on {mesh.size} simulated devices\n"
            "give smaller arguments, jax.ShapeDtypeStruct of fewer rows or a smaller model: what is compiled for them "
            "is checked"
        ) from error
    except Unreadable as error:
        raise CheckError(f"{name} cannot be run on simulated devices: {error}") from error


class _Stage:
    """A program of one stage beside the whole one."""

    def __init__(
        self, stage: str, text: str, pair: ProgramPair, mesh: Mesh, inputs: int, limit: float, step: str = ""
    ) -> None:
        self.name, self._pair = stage, pair
        self._mesh, self._inputs, self._limit = mesh, inputs, limit
        self._exact = stage != "optimized"
        self._planned = bool(step)
        self._sources = cache(lambda: InstructionSources(step or text, pair.reference if step else pair.partitioned))

    def verdicts(self, count: int) -> list[str]:
        """Returns ``agrees``, ``wrong`` or ``unfollowed`` for every result."""
        found = list(map(_verdict, zip(*self._runs, strict=True)))
        assert len(found) == count, f"{len(found)} results, not {count}"
        return found

    @cached_property
    def _numbers(self) -> Numbers:
        return PrimeField() if self._exact else Reals()

    @cached_property
    def _runs(self) -> list[list[ResultCheck]]:
        """Per input, what becomes of every result."""
        runs = []
        for seed in range(self._inputs):
            found = self._pair.compare(self._numbers, seed, self._limit)
            if self._exact and any(map(self._is_open, found)):
                again = self._pair.compare(Reals(), seed, self._limit)
                found = [b if self._is_open(a) else a for a, b in zip(found, again, strict=True)]
            if self._planned and any(x.differs for x in found):
                found = self._without_bad_indices(seed, found)
            runs.append(found)
        return self._without_rounding(runs)

    def _without_rounding(self, runs: list[list[ResultCheck]]) -> list[list[ResultCheck]]:
        """Results that differ from the step no more than it does from itself, but for rounding, are left open."""
        doubtful = {i for i, rows in enumerate(zip(*runs, strict=True)) if all(x.differs and x.rounded for x in rows)}
        seeds = range(len(runs)) if doubtful else ()
        unstable = doubtful & {i for seed in seeds for i in self._pair.unstable(seed, self._limit)}
        why = Unfollowed(self._pair.result(), "rounding errors change it: compare by running it")
        return [
            [replace(x, differs=False, unfollowed=why) if x.index in unstable else x for x in found] for found in runs
        ]

    def _without_bad_indices(self, seed: int, found: list[ResultCheck]) -> list[ResultCheck]:
        """Results that differ only for integers that may be out of range are left open: a step may not allow them."""
        if (drawn := self._pair.drawn_integer()) is None:
            return found
        again = self._pair.compare(Reals(), seed, self._limit, below=_FEW)
        why = Unfollowed(drawn, "differs for some integers, which may be no indices of this step: give values")
        pairs = zip(found, again, strict=True)
        return [replace(a, differs=False, unfollowed=why) if a.differs and not b.differs else a for a, b in pairs]

    def _is_open(self, found: ResultCheck) -> bool:
        """Whether exact arithmetic does not tell."""
        return found.unfollowed is not None or (self._planned and found.differs)

    def faults(self, paths: Sequence[str], wrong: Sequence[int]) -> list[CompiledFault]:
        """Returns the operations that make some results wrong."""
        found: dict[int, FaultyOperation | None] = dict.fromkeys(wrong)
        if wrong:
            seed = next(i for i, run in enumerate(self._runs) if any(run[j].differs for j in wrong))
            for numbers in (self._numbers, Reals()):
                found |= self._found(numbers, seed, [i for i in wrong if found[i] is None])
        grouped: dict[str, tuple[FaultyOperation | None, list[str]]] = {}
        for i, fault in found.items():
            grouped.setdefault(fault.operation.name if fault else "", (fault, []))[1].append(paths[i])
        return [self._located(fault, results) for fault, results in grouped.values()]

    def _found(self, numbers: Numbers, seed: int, wrong: Sequence[int]) -> dict[int, FaultyOperation | None]:
        """The faults behind some results, in one run with every value recorded."""
        if not wrong:
            return {}
        whole, local = Recording(), Recording()
        checks = self._pair.compare(numbers, seed, self._limit, whole, local)
        types = ObservedTypes(whole, local, numbers, self._mesh)
        finder = FaultFinder(self._pair.partitioned, local, types, self._mesh)
        found = {i: finder.fault(i) for i in wrong if checks[i].differs}
        again = self._pair.compare(numbers, seed, self._limit, below=_FEW)
        return {i: fault if fault is None or again[i].differs else _beyond(fault) for i, fault in found.items()}

    def typed(self) -> Iterator[TypedValue]:
        """Returns the values of the program, those behind tuples and copies aside."""
        whole, local = Recording(), Recording()
        self._pair.compare(self._numbers, 0, self._limit, whole, local)
        types = ObservedTypes(whole, local, self._numbers, self._mesh)
        for record in local.records:
            operation, value = record.operation, record.value
            is_own = operation.opcode not in _PASSED_ON and isinstance(value, np.ndarray)
            if not is_own or types.constant(value):
                continue
            known = types.of(value)
            yield TypedValue(
                operation.opcode,
                self._place(operation),
                f"{operation.type.dtype}[{','.join(map(str, operation.type.dims))}]",
                known.layout if known else None,
            )

    def _located(self, fault: FaultyOperation | None, results: Sequence[str]) -> CompiledFault:
        if fault is None:
            text = "no single operation makes it so: it differs from the step in float64 or behind a loop"
            return CompiledFault("another value", "program", (), Source(), text, self.name, tuple(results))
        place = self._place(fault.step if self._planned else fault.operation)
        return CompiledFault(
            fault.kind, fault.operation.opcode, fault.axes, place, fault.text, self.name, tuple(results)
        )

    def unfollowed(self, paths: Sequence[str]) -> list[UnfollowedOperation]:
        """Returns the operations behind results that could not be followed."""
        grouped: dict[tuple[str, str], tuple[Unfollowed, list[str]]] = {}
        for check in self._runs[0]:
            if (cause := check.unfollowed) is not None:
                key = cause.operation.name, cause.reason
                grouped.setdefault(key, (cause, []))[1].append(paths[check.index])
        return [
            UnfollowedOperation(
                cause.operation.opcode,
                self._place(cause.operation),
                cause.reason,
                self.name,
                tuple(results),
            )
            for cause, results in grouped.values()
        ]

    def _place(self, operation: Operation | None) -> Source:
        """The line of an operation; planned programs have those of the step, whose operations state them."""
        if operation is None or (self._planned and not self._is_of_step(operation)):
            return Source()
        sources = self._sources()
        return sources.of(sources.metadata(operation.name, operation.instruction.attributes))

    def _is_of_step(self, operation: Operation) -> bool:
        lines = self._pair.reference.computations.values()
        return any(line is operation.instruction for body in lines for line in body)


def _beyond(fault: FaultyOperation) -> FaultyOperation:
    """A fault that only large integers among the arguments show: jax clamps indices, compilers may forget to."""
    return replace(
        fault, text=f"{fault.text}; right if all integer arguments are below {_FEW}, so an index may be out of range"
    )


def _verdict(rows: Sequence[ResultCheck]) -> str:
    """Of one result, over all inputs; where numbers are rounded, a comparison may come out otherwise for one."""
    if any(x.unfollowed for x in rows):
        return "unfollowed"
    return "wrong" if (all if rows[0].rounded else any)(x.differs for x in rows) else "agrees"
