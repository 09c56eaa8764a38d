"""Which functions a traced step took of its ``md.alternatives``."""

from meshdsl.errors import ArgumentError
from meshdsl.ir.graph import FunctionChoice, Graph, walk


def alternatives_in(graph: Graph) -> tuple[FunctionChoice, ...]:
    """Returns the alternatives of a step as it is read, in the order in which it first says them.

    Raises:
      ArgumentError: the same name is said of different functions.
    """
    found: dict[str, FunctionChoice] = {}
    for op in (op for _, op in walk(graph) if op.name == "alternatives"):
        this = FunctionChoice(op.params["name"], op.params["taken"], op.params["names"])
        other = found.setdefault(this.name, this)
        if other != this:
            one, two = (", ".join(each.names) for each in (other, this))
            raise ArgumentError(
                f"alternatives {this.name!r} at {op.source}: of {two}, elsewhere of {one}; choose two names, or give "
                "the same functions in the same order"
            )
    return tuple(found.values())
