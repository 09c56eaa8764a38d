"""The checker of the grammar of ``graph``: run on every traced or rewritten graph, and after every pass in tests."""

from collections.abc import Iterable

from meshdsl.errors import TraceError
from meshdsl.ir.graph import LOOPS, Atom, Graph, Op, Value, walk
from meshdsl.ir.loops import PortRole, loop_ports
from meshdsl.ir.manual import find_manual, read_axes


def check_graph(graph: Graph) -> None:
    """Checks that every value is defined once and before its uses, that bodies match their loops, and manual axes.

    Raises:
      TraceError: the graph breaks the grammar; the message names the op and the values or types in question.
    """
    _check_grammar(graph)
    _check_manual(graph)


def _check_grammar(graph: Graph) -> None:
    known = {v.id for v in graph.inputs}
    if not graph.ops or [i for i, op in enumerate(graph.ops) if op.name == "return"] != [len(graph.ops) - 1]:
        raise TraceError("a graph must end with its only 'return'")
    for op in graph.ops:
        if not known.issuperset([v.id for v in op.inputs if isinstance(v, Value)]):
            unknown = [v.id for v in op.inputs if isinstance(v, Value) and v.id not in known]
            raise TraceError(f"{op.name} reads values {unknown}, which are not defined before it in its graph")
        defined = [v.id for v in op.outputs]
        if not known.isdisjoint(defined):
            raise TraceError(f"{op.name} defines values {[v for v in defined if v in known]} a second time")
        known.update(defined)
        if op.bodies or op.name in LOOPS:
            _check_bodies(op)


def _check_manual(graph: Graph) -> None:
    """Checks that only operations of a shard_map's body read the blocks inside it."""
    found = find_manual(graph)
    for _, op in walk(graph) if found else ():
        bad = [v.id for v in op.inputs if not set(found.get(v.id, ())) <= {*read_axes(op)}]
        if bad and not op.bodies and op.name != "return":
            raise TraceError(f"{op.name} reads values {bad} of a shard_map's body outside of it")


def _check_bodies(op: Op) -> None:
    """Checks the number and the types of what the bodies of a loop take and return, and the bodies themselves."""
    counts = {"scan": len(op.bodies) == 1, "while": len(op.bodies) == 2, "cond": len(op.bodies) > 0}
    if not counts.get(op.name, False):
        raise TraceError(f"{op.name} has {len(op.bodies)} bodies")
    for (takes, returns), body in zip(_interfaces(op), op.bodies, strict=True):
        for what, has, wants in (("takes", _types(body.inputs), takes), ("returns", _types(body.returned), returns)):
            if has != wants:
                raise TraceError(f"a body of {op.name} {what} {', '.join(has)}; its loop has {', '.join(wants)}")
        _check_grammar(body)


def _interfaces(op: Op) -> list[tuple[list[str], list[str]]]:
    """Per body, the types that it has to take and to return."""
    found: list[tuple[list[str], list[str]]] = [([], []) for _ in op.bodies]
    for port in loop_ports(op):
        for body, _ in port.inputs:
            found[body][0].append(_type(op.inputs[port.operand], port.stacked))
        for body, _ in port.outputs:
            predicate = port.role is PortRole.PREDICATE
            found[body][1].append("bool[]" if predicate else _type(op.outputs[port.result], port.stacked))
    return found


def _type(x: Atom, stacked: bool) -> str:
    """Dtype and shape inside a body as text."""
    return f"{x.dtype}[{','.join(map(str, x.shape[stacked:]))}]"


def _types(atoms: Iterable[Atom]) -> list[str]:
    return [_type(x, False) for x in atoms]
