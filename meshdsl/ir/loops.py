"""How the operands, body inputs, body outputs and results of a loop or conditional correspond.

A loop passes arrays through its boundary in a few ways; a *port* is one array with all positions at which it appears:

    role        operand     body inputs      body outputs     result
    ------------------------------------------------------------------------------------------------------------
    const       yes         one body                                      the same in every iteration
    carry       yes         body (, cond)    body             yes         a new value in every iteration
    slice       yes         body                                          the stack outside has one more leading dim
    stack                                    body             yes         likewise, written slice by slice
    operand     yes         every branch                                  of a cond: what its branches read
    result                                   every branch     yes         of a cond
    predicate   of a cond                    of a while                   a scalar that decides what runs

Example: ``scan W x0 xs -> x, ys`` with one const and one carry has the ports

    const(operand 0, input 0)   carry(operand 1, input 1, output 0, result 0)
    slice(operand 2, input 2)   stack(output 1, result 1)

``loop_ports`` is the only place that knows the order of a loop's operands; ``with_ports`` is its inverse, for passes
that drop or add ports or change their role; ``split_operands`` cuts anything parallel to the operands into the groups
of the grammar.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from enum import Enum
from typing import Generic, NamedTuple, TypeVar

from meshdsl.ir.graph import Atom, Graph, Op, Value

T = TypeVar("T")
ABSENT = -1  # the position of a port where it does not appear
BodyPosition = tuple[int, int]  # a body, and the position among its inputs or among the values it returns


class PortRole(Enum):
    """How an array passes the boundary of a loop or conditional; ``with_ports`` groups ports in this order."""

    PREDICATE = "predicate"
    CONST = "const"
    CARRY = "carry"
    SLICE = "slice"
    STACK = "stack"
    OPERAND = "operand"
    RESULT = "result"


_ORDER = {role: i for i, role in enumerate(PortRole)}


class LoopPort(NamedTuple):
    """One array that passes the boundary of a loop or conditional.

    Args:
      role: how it passes.
      operand: its position among the operands of the op; ``ABSENT`` if it is made inside.
      inputs: its positions among the inputs of the bodies, in the order of the bodies.
      outputs: its positions among the values that the bodies return, in the order of the bodies.
      result: its position among the results of the op; ``ABSENT`` if it does not leave.
    """

    role: PortRole
    operand: int = ABSENT
    inputs: tuple[BodyPosition, ...] = ()
    outputs: tuple[BodyPosition, ...] = ()
    result: int = ABSENT

    @property
    def stacked(self) -> bool:
        """Whether the array outside has one more leading dim, the iterations, than inside."""
        return self.role in (PortRole.SLICE, PortRole.STACK)

    @property
    def invariant(self) -> bool:
        """Whether every run of a body reads the same array."""
        return self.role in (PortRole.CONST, PortRole.OPERAND)


def loop_ports(op: Op) -> Iterator[LoopPort]:
    """Yields the ports of a loop or conditional; none for any other op.

    Operands, inputs of each body, outputs of each body and results occur in order of their positions. Only the op's
    parameters and the numbers of its operands, results and bodies are read, not the bodies.
    """
    if op.name == "scan":
        yield from _scan(op)
    elif op.name == "while":
        yield from _while(op)
    elif op.name == "cond":
        branches, consts = range(len(op.bodies)), len(op.inputs) - 1
        yield LoopPort(PortRole.PREDICATE, operand=0)
        for i in range(consts):
            yield LoopPort(PortRole.OPERAND, 1 + i, tuple((branch, i) for branch in branches))
        for j in range(len(op.outputs)):
            yield LoopPort(PortRole.RESULT, outputs=tuple((branch, j) for branch in branches), result=j)


def _scan(op: Op) -> Iterator[LoopPort]:
    consts, carries = op.params["num_consts"], op.params["num_carry"]
    for i in range(consts):
        yield LoopPort(PortRole.CONST, i, ((0, i),))
    for i, j in zip(range(consts, consts + carries), range(carries), strict=True):
        yield LoopPort(PortRole.CARRY, i, ((0, i),), ((0, j),), j)
    for i in range(consts + carries, len(op.inputs)):
        yield LoopPort(PortRole.SLICE, i, ((0, i),))
    for j in range(carries, len(op.outputs)):
        yield LoopPort(PortRole.STACK, outputs=((0, j),), result=j)


def _while(op: Op) -> Iterator[LoopPort]:
    condition, body, carries = op.params["cond_nconsts"], op.params["body_nconsts"], len(op.outputs)
    for i in range(condition):
        yield LoopPort(PortRole.CONST, i, ((0, i),))
    for i in range(body):
        yield LoopPort(PortRole.CONST, condition + i, ((1, i),))
    for j in range(carries):
        yield LoopPort(PortRole.CARRY, condition + body + j, ((0, condition + j), (1, body + j)), ((1, j),), j)
    yield LoopPort(PortRole.PREDICATE, outputs=((0, 0),))


def with_ports(op: Op, ports: Iterable[LoopPort], bodies: Sequence[Graph] | None = None) -> Op:
    """Returns the loop with exactly these ports, so that ``with_ports(op, loop_ports(op))`` is ``op``.

    Args:
      ports: their positions point into the operands and results of ``op``, and into the inputs and outputs of
        ``bodies``. Roles may differ from those in ``op``. Sorted by role (consts also by body), stably.
      bodies: the bodies, if they are not those of ``op``.
    """
    chosen = sorted(ports, key=lambda port: (_ORDER[port.role], *[body for body, _ in port.inputs[:1]]))
    bodies = op.bodies if bodies is None else bodies
    return replace(
        op,
        inputs=tuple(op.inputs[port.operand] for port in chosen if port.operand != ABSENT),
        outputs=tuple(op.outputs[port.result] for port in chosen if port.result != ABSENT),
        params={**op.params, **_counts(op.name, chosen)},
        bodies=tuple(_with_interface(body, which, chosen) for which, body in enumerate(bodies)),
    )


def reading_more(op: Op, body: Graph, more: Sequence[tuple[PortRole, Atom, Value]]) -> Op:
    """Returns a scan with another body, which reads more than that of ``op``.

    Args:
      more: consts and slices, each with its operand and the input of the body that it is read as.
    """
    operands, inputs = len(op.inputs), len(body.inputs)
    ports = [LoopPort(role, operands + k, ((0, inputs + k),)) for k, (role, _, _) in enumerate(more)]
    body = replace(body, inputs=(*body.inputs, *(inside for _, _, inside in more)))
    longer = replace(op, inputs=(*op.inputs, *(operand for _, operand, _ in more)))
    return with_ports(longer, [*loop_ports(op), *ports], (body,))


def _with_interface(body: Graph, which: int, ports: Sequence[LoopPort]) -> Graph:
    """The body with the inputs and outputs that the ports name."""
    last = body.ops[-1]
    inputs = tuple(body.inputs[i] for port in ports for b, i in port.inputs if b == which)
    returned = tuple(last.inputs[j] for port in ports for b, j in port.outputs if b == which)
    return replace(body, inputs=inputs, ops=(*body.ops[:-1], replace(last, inputs=returned)))


def _counts(name: str, ports: Sequence[LoopPort]) -> dict[str, int]:
    """The parameters of an op with these ports that count operands."""
    consts = [port.inputs[0][0] for port in ports if port.role is PortRole.CONST]  # the body that reads each
    if name == "scan":
        return {"num_consts": len(consts), "num_carry": sum(port.role is PortRole.CARRY for port in ports)}
    return {"cond_nconsts": consts.count(0), "body_nconsts": consts.count(1)} if name == "while" else {}


class SplitOperands(NamedTuple, Generic[T]):
    """Anything parallel to the operands of a loop or conditional, cut into the groups of the grammar.

    Args:
      predicate: of a cond, one item.
      condition: consts of a while's condition.
      consts: consts of the body, or operands of a cond.
      carry: initial values.
      slices: stacks that a scan reads slice by slice.
    """

    predicate: tuple[T, ...]
    condition: tuple[T, ...]
    consts: tuple[T, ...]
    carry: tuple[T, ...]
    slices: tuple[T, ...]


def split_operands(op: Op, items: Iterable[T]) -> SplitOperands[T]:
    """Cuts a sequence parallel to ``op.inputs`` into its groups."""
    groups: tuple[list[T], ...] = ([], [], [], [], [])
    operands = (port for port in loop_ports(op) if port.operand != ABSENT)
    for port, item in zip(operands, items, strict=True):
        groups[_group(op, port)].append(item)
    return SplitOperands(*map(tuple, groups))


def _group(op: Op, port: LoopPort) -> int:
    if port.role is PortRole.CONST:
        return 1 if op.name == "while" and port.inputs[0][0] == 0 else 2
    return {PortRole.PREDICATE: 0, PortRole.OPERAND: 2, PortRole.CARRY: 3, PortRole.SLICE: 4}[port.role]


def body_operands(op: Op) -> tuple[tuple[Atom, ...], ...]:
    """Per body, the operand that each of its inputs starts from (for a scan's slices, the whole stack)."""
    found: tuple[list[Atom], ...] = tuple([] for _ in op.bodies)
    for port in loop_ports(op):
        for body, _ in port.inputs:
            found[body].append(op.inputs[port.operand])
    return tuple(map(tuple, found))


def carried_inputs(op: Op) -> tuple[range, ...]:
    """Per body, the positions of the inputs that have a new value in every iteration; they lie behind the consts."""
    consts, carries = [0] * len(op.bodies), [0] * len(op.bodies)
    for port in loop_ports(op):
        for body, _ in port.inputs:
            consts[body] += port.role is PortRole.CONST
            carries[body] += port.role is PortRole.CARRY
    return tuple(range(first, first + count) for first, count in zip(consts, carries, strict=True))
