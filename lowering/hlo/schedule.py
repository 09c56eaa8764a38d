"""What runs beside each collective of a compiled program, read from its schedule.

Compilers of TPUs and GPUs print computations in the order in which a device runs them (``is_scheduled=true``). A
collective is asynchronous where that order has products between its start and its done:

    %s = (...) all-gather-start(%w)             or a TPU's fusion that contains AsyncCollectiveStart
    %p = bf16[...] fusion(%x, %v), ...          a product, a fusion with one, a library's call, a loop with products
    %d = bf16[...] all-gather-done(%s)          or the fusion of the same chain that contains AsyncCollectiveDone

Anything else is synchronous: a plain collective, one that a GPU's compiler marks ``is_sync``, and a start with nothing
but copies before its done.

A collective is *covered* for as long as the products beside it take, at the prices of the topology. Transfers over one
link follow each other, so a second of a product covers one of them only: products are given in the order of the
schedule to the transfer in flight that ends first, which covers as many seconds as any other order (Jackson's rule).

The schedule is *replayed* too: instructions run one after the other, products and everything else that moves memory at
the prices of the topology; a transfer begins at its start if its link is free, and its done waits for it. Copies from
and to the host's memory are transfers over a link of their own. Branches of a conditional all run, as a plan counts
them, and transfers of a loop do not wait for those in flight around it.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from math import prod

from meshdsl.layouts.collective_cost import exchange_price, slowest_link
from meshdsl.layouts.mesh import Mesh
from meshdsl.lowering.hlo.collectives import CompiledCollective, collective_at, collective_kind, readers_of
from meshdsl.lowering.hlo.flops import is_product, product_at
from meshdsl.lowering.hlo.parse import (
    Instruction,
    InstructionSite,
    Module,
    arrays,
    called,
    executed,
    members,
    trip_count,
)
from meshdsl.lowering.hlo.traffic import moved_bytes

_CHAIN = re.compile(r'chain_id="?(\w+)')
_START, _DONE = "AsyncCollectiveStart", "AsyncCollectiveDone"
_HOST, _HOST_SPACE = "host", "S(5)"  # the link to the host, and its memory in types
_PRICED_AS = {"collective-broadcast": "collective-permute"}  # one block over one link


@dataclass(frozen=True)
class RunSchedule:
    """What one device does in one run of a scheduled program.

    Args:
      collectives: every collective between several devices, in that order, loops counted.
      seconds: of one run at the topology's prices, transfers beside computation as scheduled.
      computing: seconds of its computation alone.
    """

    collectives: tuple["ScheduledCollective", ...]
    seconds: float
    computing: float


@dataclass(frozen=True)
class ScheduledCollective:
    """A collective and the products that its computation's schedule has between its start and its done.

    Args:
      sent: kind, axes, bytes and executions.
      seconds: of one execution, at the prices of the topology.
      covered: seconds of one execution that lie beside products.
      beside: names of the instructions with products between start and done; empty if it is synchronous.
    """

    sent: CompiledCollective
    seconds: float
    covered: float = 0.0
    beside: tuple[str, ...] = ()

    @property
    def asynchronous(self) -> bool:
        """Whether products run beside it."""
        return bool(self.beside)


def read_schedule(module: Module, mesh: Mesh) -> RunSchedule:
    """Returns what a scheduled program does, loops counted; those of unknown length run once."""
    run = _Schedule(module, mesh).of(module.entry)
    return RunSchedule(run.collectives, run.seconds, run.computing)


def collective_seconds(found: CompiledCollective, mesh: Mesh) -> float:
    """Returns the seconds of one execution of a compiled collective, as a plan prices it, without copies of blocks."""
    axes = found.axes if found.axes is not None else mesh.names[:1]
    whole = found.kind == "collective-permute" or found.group == prod(mesh.axis(name) for name in axes)
    kind = _PRICED_AS.get(found.kind, found.kind)
    price = exchange_price(kind, axes, mesh, 0 if whole else found.group)
    return price.seconds(float(found.bytes) / price.sent)


@dataclass(frozen=True)
class _Run:
    """One run of a computation: its collectives, the seconds of its products, and those taken per link.

    Args:
      seconds: from its beginning to its end.
      computing: seconds of computation, products and others, with nothing beside it.
    """

    collectives: tuple[ScheduledCollective, ...] = ()
    products: float = 0.0
    taken: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    computing: float = 0.0


@dataclass
class _InFlight:
    """A collective in flight: where it ends, when it is over, and what is covered of it so far."""

    found: ScheduledCollective
    link: str
    ends: int
    over: float
    covered: float = 0.0
    beside: list[str] = field(default_factory=list)


class _Clock:
    """Time on a device whose instructions run one after the other, beside its links.

    Attributes:
      now: seconds since the beginning.
    """

    def __init__(self, contention: float) -> None:
        self.now = 0.0
        self._free = defaultdict[str, float](float)
        self._slower = 1 + contention

    def compute(self, seconds: float) -> None:
        """Computes something, slower while a collective is in flight."""
        flying = max(0.0, max((free for link, free in self._free.items() if link != _HOST), default=0.0) - self.now)
        beside = min(seconds, flying / self._slower)
        self.now += beside * self._slower + seconds - beside

    def run(self, run: _Run) -> None:
        """Runs a loop or branches, whose time is known."""
        self.now += run.seconds

    def send(self, link: str, seconds: float) -> float:
        """Begins a transfer once its link is free; returns when it is over."""
        self._free[link] = max(self.now, self._free[link]) + seconds
        return self._free[link]

    def wait(self, over: float) -> None:
        """Waits for a transfer."""
        self.now = max(self.now, over)


class _Schedule:
    """Reads the computations of a module, each once."""

    def __init__(self, module: Module, mesh: Mesh) -> None:
        self.module, self.mesh = module, mesh
        self.of = cache(self._of)

    def _of(self, name: str) -> _Run:
        """One run of a computation, in the order of its instructions."""
        lines = self.module.computations.get(name, ())
        readers, ends, mesh = readers_of(lines), self._ends(lines), self.mesh
        by_name, clock = {line.name: line for line in lines}, _Clock(mesh.topology.contention)
        found: list[ScheduledCollective | _InFlight] = []
        flying: list[_InFlight] = []
        copies: dict[int, float] = {}  # when those from and to the host are over, by the position of their end
        total, computing, taken = 0.0, 0.0, defaultdict[str, float](float)
        for at, line in enumerate(lines):
            clock.wait(copies.get(at, 0.0))
            for transfer in flying:
                if transfer.ends <= at:
                    clock.wait(transfer.over)
            flying = [transfer for transfer in flying if transfer.ends > at]
            for site in self._sent(line, name):
                around = self.module.computations[site.inside]
                sent = collective_at(site, around, readers if site.inside == name else readers_of(around), mesh)
                if sent.group == 1:
                    continue
                one = ScheduledCollective(sent, collective_seconds(sent, mesh))
                link = slowest_link(sent.axes if sent.axes is not None else mesh.names[:1], mesh)
                over = clock.send(link, one.seconds)
                if ends.get(at, at) == at:
                    found.append(one)
                    clock.wait(over)
                else:
                    flying.append(_InFlight(one, link, ends[at], over))
                    found.append(flying[-1])
            if copied := self._host_seconds(line):
                copies[ends.get(at, at)] = clock.send(_HOST, copied)
            run = self._inside(line, name)
            if run.seconds:
                clock.run(run)
                computing += run.computing
            else:
                alone = max(run.products, self._moving(line, by_name))
                clock.compute(alone)
                computing += alone
            found += run.collectives
            if run.products:
                total += run.products
                for link, seconds in _cover(line.name, run, flying).items():
                    taken[link] += seconds
        return _Run(tuple(map(_landed, found)), total, dict(taken), clock.now, computing)

    def _moving(self, line: Instruction, lines: Mapping[str, Instruction]) -> float:
        """Seconds in which an instruction reads and writes memory."""
        topology, moved = self.mesh.topology, moved_bytes(line, lines, self.module)
        return moved / topology.memory_bandwidth + topology.overhead if moved else 0.0

    def _host_seconds(self, line: Instruction) -> float:
        """Seconds of a copy from or to the host's memory that an instruction starts."""
        topology = self.mesh.topology
        if line.opcode != "copy-start" or _HOST_SPACE not in line.type or not topology.host_load:
            return 0.0
        made, *_ = members(line.type)
        rate = topology.host_store if _HOST_SPACE in made else topology.host_load
        return float(sum(x.bytes for x in arrays(made))) / rate + topology.overhead

    def _sent(self, line: Instruction, inside: str) -> Iterator[InstructionSite]:
        """The collectives that an instruction starts, or is; those of loops and branches are their bodies' own."""
        if collective_kind(line.opcode):
            yield InstructionSite(line, inside)
        elif line.opcode in ("fusion", "async-start"):
            for callee in called(line):
                yield from executed(replace(self.module, entry=callee), lambda each: bool(collective_kind(each.opcode)))

    def _inside(self, line: Instruction, name: str) -> _Run:
        """What an instruction computes, and what the loop or the branches that it is send."""
        if is_product(line):
            product = product_at(line, self.module.computations[name])
            return _Run(products=product.seconds(self.mesh.topology))
        if line.opcode in ("fusion", "custom-call"):
            return _Run(products=sum(map(self._fused, called(line))))
        if line.opcode not in ("while", "call", "conditional", "async-start"):
            return _Run()
        count = trip_count(line, self.module) if line.opcode == "while" else 1
        known, taken = count is not None, defaultdict[str, float](float)
        trips = 1 if count is None else count
        runs = [self.of(callee) for callee in called(line)]
        for run in runs:
            for link, seconds in run.taken.items():
                taken[link] += trips * seconds
        sent = [_repeated(one, trips, known) for run in runs for one in run.collectives]
        if line.opcode == "async-start":
            return _Run((), sum(run.products for run in runs), dict(taken))
        names = ("products", "seconds", "computing")
        products, seconds, computing = (trips * sum(getattr(run, name) for run in runs) for name in names)
        return _Run(tuple(sent), products, dict(taken), seconds, computing)

    def _fused(self, callee: str) -> float:
        """Seconds of the products of a fusion."""
        sites = executed(replace(self.module, entry=callee), is_product)
        found = ((site.trips, product_at(site.instruction, self.module.computations[site.inside])) for site in sites)
        return sum(trips * product.seconds(self.mesh.topology) for trips, product in found)

    def _ends(self, lines: Iterable[Instruction]) -> dict[int, int]:
        """Per position of a start, the position of its done."""
        starts: dict[str, int] = {}
        found: dict[int, int] = {}
        for at, line in enumerate(lines):
            if line.opcode.endswith("-start") and '"is_sync":true' not in line.rest:
                starts[line.name] = at
            elif line.opcode.endswith("-update") and line.operands[0] in starts:
                starts[line.name] = starts[line.operands[0]]
            elif line.opcode.endswith("-done") and line.operands[0] in starts:
                found[starts[line.operands[0]]] = at
            elif line.opcode == "fusion":
                for mark, chain in self._chain(line):
                    if mark == _START:
                        starts[chain] = at
                    elif chain in starts:
                        found[starts[chain]] = at
        return found

    def _chain(self, line: Instruction) -> Iterator[tuple[str, str]]:
        """Whether a TPU's fusion starts or ends a chain, and which."""
        for inner in (inner for callee in called(line) for inner in self.module.computations.get(callee, ())):
            marks = [mark for mark in (_START, _DONE) if mark in inner.rest]
            if marks:
                yield marks[0], self._chain_of(line)

    def _chain_of(self, line: Instruction) -> str:
        lines = (inner for callee in called(line) for inner in self.module.computations[callee])
        return next((f"chain {match.group(1)}" for inner in lines if (match := _CHAIN.search(inner.rest))), "chain")


def _cover(name: str, run: _Run, flying: Iterable[_InFlight]) -> dict[str, float]:
    """Gives the seconds of products to the transfers in flight; returns the seconds that are taken per link."""
    left = defaultdict(lambda: run.products, {link: run.products - seconds for link, seconds in run.taken.items()})
    for transfer in sorted(flying, key=lambda transfer: transfer.ends):
        given = min(left[transfer.link], transfer.found.seconds - transfer.covered)
        left[transfer.link] -= given
        transfer.covered += given
        transfer.beside.append(name)
    return {link: run.products - seconds for link, seconds in left.items()}


def _landed(found: ScheduledCollective | _InFlight) -> ScheduledCollective:
    """The collective with what was covered of it."""
    if isinstance(found, ScheduledCollective):
        return found
    return replace(found.found, covered=found.covered, beside=tuple(found.beside))


def _repeated(one: ScheduledCollective, trips: int, known: bool) -> ScheduledCollective:
    """A collective of a loop's body, once per iteration."""
    sent = replace(one.sent, trips=one.sent.trips * trips, known=one.sent.known and known)
    return replace(one, sent=sent)
