"""The bound that messages prove on a network in which many variables receive the same ones: evaluated once for those.

The layers of a large step have the tables of one layer, and those in the middle receive equal messages from both
sides (see ``reduced_depth``). ``mrf.kernels`` says what to mind when renaming types here.
A variable's part of the bound depends on its costs, its tables and its messages only.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshdsl.planner.mrf.kernels import FlatNetwork, argmin, min_plus
from meshdsl.planner.mrf.trws import MessagePassing, Packed
from meshdsl.util.jit import Costs, Ints, njit_cached


class SharedMessages(NamedTuple):
    """Messages of a smaller network, as the half edges of a larger one send and receive them.

    Args:
      sent: the messages.
      out: where that of each half edge of the smaller network begins.
      outgoing: per half edge of the larger network, the one whose message it sends; -1 for none.
      incoming: likewise, the one whose message it receives.
      scale: what the message that each half edge sends is multiplied by.
    """

    sent: Costs
    out: Ints
    outgoing: Ints
    incoming: Ints
    scale: Costs


def bound_from_shared_messages(network: Packed, known: MessagePassing, counterparts: Ints) -> float:
    """Returns the lower bound on a network that the messages of a smaller one prove.

    Args:
      known: messages of the smaller network, whose tables are those of ``network``.
      counterparts: per half edge, the one of the smaller network whose message it takes; -1 for no message. Its
        reverse must take that of the reverse: the bound holds only if both ends of an edge know the same messages.
    """
    flat, incoming = network.flat, counterparts[network.flat.back]
    scale = np.where(counterparts >= 0, _shares(known.flat)[counterparts] / _shares(flat), 0.0)
    hashes = variable_hashes(flat, network.unary, counterparts, scale)
    _, first, group = np.unique(hashes, return_index=True, return_inverse=True)
    same = are_equal(flat, network.unary, counterparts, scale, first[group])
    representative = np.where(same, first[group], np.arange(group.size))  # hashes may collide
    variables, counts = np.unique(representative, return_counts=True)
    messages = SharedMessages(known.sent, known.flat.out, counterparts, incoming, scale)
    return network.constant + proved_bound(flat, network.unary, network.tables, messages, variables, counts)


def _shares(flat: FlatNetwork) -> Costs:
    """Returns per half edge the number of parts into which its variable divides what it knows, as in ``sweep``."""
    count = np.diff(flat.first)
    source = np.repeat(np.arange(count.size), count)
    behind = np.bincount(source, flat.to < source, count.size)
    return np.asarray(np.maximum(np.maximum(behind, count - behind), 1)[source])


@njit_cached
def variable_hashes(flat: FlatNetwork, unary: Costs, outgoing: Ints, scale: Costs) -> Ints:
    """Returns a hash per variable, the same for variables that ``are_equal``."""
    start, first, to = flat.start, flat.first, flat.to
    hashes, bits, part = np.empty(start.size - 1, dtype=np.int64), unary.view(np.int64), scale.view(np.int64)
    for v in range(hashes.size):
        found = start[v + 1] - start[v]
        for i in range(start[v], start[v + 1]):
            found = (found ^ bits[i]) * 0x100000001B3
        for h in range(first[v], first[v + 1]):
            found = ((found ^ outgoing[h]) * 0x100000001B3) ^ (2 * flat.table[h] + (to[h] < v))
            found = ((found * 0x100000001B3) ^ part[h] ^ (part[flat.back[h]] << 1)) * 0x100000001B3
        hashes[v] = found
    return hashes


@njit_cached
def are_equal(flat: FlatNetwork, unary: Costs, outgoing: Ints, scale: Costs, others: Ints) -> NDArray[np.bool_]:
    """Returns per variable whether it has the costs, the tables and the messages of another one."""
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
            found[v] &= outgoing[h] == outgoing[g] and flat.table[h] == flat.table[g] and (to[h] < v) == (to[g] < w)
            found[v] &= scale[h] == scale[g] and scale[back[h]] == scale[back[g]]
    return found


@njit_cached
def proved_bound(
    flat: FlatNetwork, unary: Costs, tables: Costs, messages: SharedMessages, variables: Ints, counts: Ints
) -> float:
    """Returns the minima that variables retain, and those left on their edges to earlier ones, ``counts`` times each.

    As in ``sweep`` an edge holds a share of its later variable; its minimum need not be zero here.
    """
    start, first, to, back, _, table = flat
    sent, out, outgoing, incoming, scale = messages
    lower = 0.0
    for k in range(variables.size):
        v = variables[k]
        size, count, behind = start[v + 1] - start[v], first[v + 1] - first[v], 0
        total, known = np.empty(size), np.empty(size)
        for i in range(size):
            total[i] = unary[start[v] + i]
        for h in range(first[v], first[v + 1]):
            behind += to[h] < v
            if incoming[h] >= 0:
                message = sent[out[incoming[h]] :]
                for i in range(size):
                    total[i] += message[i] * scale[back[h]]
        share = max(behind, count - behind, 1)
        found = total[argmin(total)] * (1 - behind / share)
        for h in range(first[v], first[v + 1]):
            if to[h] < v:
                rest = np.empty(start[to[h] + 1] - start[to[h]])
                for i in range(size):
                    known[i] = total[i] / share
                if incoming[h] >= 0:
                    message = sent[out[incoming[h]] :]
                    for i in range(size):
                        known[i] -= message[i] * scale[back[h]]
                min_plus(known, tables, table[h], rest)
                if outgoing[h] >= 0:
                    message = sent[out[outgoing[h]] :]
                    for i in range(rest.size):
                        rest[i] -= message[i] * scale[h]
                found += rest[argmin(rest)]
        lower += found * counts[k]
    return lower
