"""What messages prove of a network where many of its variables hear the same: worked out once for those.

The layers of a large step have the tables of one, and those in the middle hear the same from either side.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshdsl.planner.mrf.kernels import Flat, argmin, min_plus
from meshdsl.planner.mrf.trws import MessagePassing, Packed
from meshdsl.util.jit import Costs, Ints, njit_cached


def bound_from_shared_messages(network: Packed, known: MessagePassing, like: Ints) -> float:
    """What no states of a network undercut by the messages of a smaller one; what many variables hear alike, once.

    Args:
      known: messages of the smaller one, whose tables are those of the network.
      like: per half edge, the one of the smaller one whose message is its own; -1 for no message. Its reverse must be
        like the reverse of that one: the bound holds only if both ends of an edge know the same messages.
    """
    flat, heard = network.flat, like[network.flat.back]
    parts = np.where(like >= 0, _shares(known.flat)[like] / _shares(flat), 0.0)
    marks = marked(flat, network.unary, like, parts)
    _, first, kind = np.unique(marks, return_index=True, return_inverse=True)
    kind = np.where(equals(flat, network.unary, like, parts, first[kind]), first[kind], np.arange(kind.size))
    variables, counts = np.unique(kind, return_counts=True)
    said = SharedMessages(known.sent, known.flat.out, like, heard, parts)
    return network.constant + proved(flat, network.unary, network.tables, said, variables, counts)


class SharedMessages(NamedTuple):
    """Messages, where those of each half edge begin, and per half edge of the network, which it sends and hears.

    Args:
      parts: of its message that each half edge sends.
    """

    sent: Costs
    out: Ints
    like: Ints
    heard: Ints
    parts: Costs


def _shares(flat: Flat) -> Costs:
    """Per half edge, among how many its variable shares out what it knows, as in ``sweep``."""
    count = np.diff(flat.first)
    source = np.repeat(np.arange(count.size), count)
    behind = np.bincount(source, flat.to < source, count.size)
    return np.asarray(np.maximum(np.maximum(behind, count - behind), 1)[source])


@njit_cached
def marked(flat: Flat, unary: Costs, like: Ints, parts: Costs) -> Ints:
    """A number per variable, the same for those that have the same costs and hear the same (see ``equals``)."""
    start, first, to = flat.start, flat.first, flat.to
    marks, bits, part = np.empty(start.size - 1, dtype=np.int64), unary.view(np.int64), parts.view(np.int64)
    for v in range(marks.size):
        mark = start[v + 1] - start[v]
        for i in range(start[v], start[v + 1]):
            mark = (mark ^ bits[i]) * 0x100000001B3
        for h in range(first[v], first[v + 1]):
            mark = ((mark ^ like[h]) * 0x100000001B3) ^ (2 * flat.table[h] + (to[h] < v))
            mark = ((mark * 0x100000001B3) ^ part[h] ^ (part[flat.back[h]] << 1)) * 0x100000001B3
        marks[v] = mark
    return marks


@njit_cached
def equals(flat: Flat, unary: Costs, like: Ints, parts: Costs, others: Ints) -> NDArray[np.bool_]:
    """Whether each variable has the costs of another, and half edges that hear the same and lead the same way."""
    start, first, to, back = flat.start, flat.first, flat.to, flat.back
    found = np.ones(others.size, dtype=np.bool_)
    for v in range(others.size):
        w, size, count = others[v], start[v + 1] - start[v], first[v + 1] - first[v]
        if size != start[w + 1] - start[w] or count != first[w + 1] - first[w]:
            found[v] = False
            continue
        for i in range(size):
            found[v] &= unary[start[v] + i] == unary[start[w] + i]
        for k in range(count):
            h, g = first[v] + k, first[w] + k
            found[v] &= like[h] == like[g] and flat.table[h] == flat.table[g] and (to[h] < v) == (to[g] < w)
            found[v] &= parts[h] == parts[g] and parts[back[h]] == parts[back[g]]
    return found


@njit_cached
def proved(flat: Flat, unary: Costs, tables: Costs, said: SharedMessages, variables: Ints, counts: Ints) -> float:
    """What variables keep at least, and what is left for their edges to earlier ones, each so many times.

    As in ``sweep`` an edge has a share of its later variable; here it may leave something over, or take more.
    """
    start, first, to, back, _, table = flat
    sent, out, like, heard, parts = said
    lower = 0.0
    for k in range(variables.size):
        v = variables[k]
        size, count, behind = start[v + 1] - start[v], first[v + 1] - first[v], 0
        total, paid = np.empty(size), np.empty(size)
        for i in range(size):
            total[i] = unary[start[v] + i]
        for h in range(first[v], first[v + 1]):
            behind += to[h] < v
            if heard[h] >= 0:
                message = sent[out[heard[h]] :]
                for i in range(size):
                    total[i] += message[i] * parts[back[h]]
        share = max(behind, count - behind, 1)
        found = total[argmin(total)] * (1 - behind / share)
        for h in range(first[v], first[v + 1]):
            if to[h] < v:
                left = np.empty(start[to[h] + 1] - start[to[h]])
                for i in range(size):
                    paid[i] = total[i] / share
                if heard[h] >= 0:
                    message = sent[out[heard[h]] :]
                    for i in range(size):
                        paid[i] -= message[i] * parts[back[h]]
                min_plus(paid, tables, table[h], left)
                if like[h] >= 0:
                    message = sent[out[like[h]] :]
                    for i in range(left.size):
                        left[i] -= message[i] * parts[h]
                found += left[argmin(left)]
        lower += found * counts[k]
    return lower
