"""What nodes pay for memory where it is short: over their joint states, and in a plan, with the copies they read."""

from collections.abc import Hashable, Iterator

import numpy as np

from meshdsl.planner.arrays import array, grouped
from meshdsl.planner.exact import TIES, Costs
from meshdsl.planner.identity import identity
from meshdsl.planner.model import Assignment, Model
from meshdsl.planner.tables import per_axis


def payers(model: Model) -> list[int]:
    """The nodes whose states cost more at the model's present prices, copies aside."""
    wiring = model.wiring
    made = wiring.nodes[wiring.made[model.problem.numbers.of(model.prices.own)]].tolist()
    return sorted({*made, *(n for n, _ in model.prices.held)})


def terms(model: Model, n: int) -> Hashable:
    """What the price of a node consists of: nodes with one table and equal terms pay alike."""
    own, held, wiring = model.prices.own, model.prices.held, model.wiring
    made = tuple([(p, own[value]) for p, value in wiring.makes(n) if value in own])
    there = [(p, *held[n, p]) for p in range(len(wiring.ports(n))) if (n, p) in held]
    return made, tuple([(p, price, identity(share)) for p, price, share in there])


def paid(model: Model, n: int) -> Costs:
    """What a node pays in every joint state; for bytes that are there whatever the plan, rounded down."""
    total = np.zeros_like(model.units[n])
    for price, share in _made(model, n):
        total += model.scale.pack(price * share)
    for p in range(len(model.wiring.ports(n))):
        if (n, p) in model.prices.held:
            price, share = model.prices.held[n, p]
            total += np.floor(price * share / model.scale.unit) * TIES
    return total


def paid_in(model: Model, rows: Assignment) -> float:
    """What a plan pays for the values that it makes and the copies that it reads."""
    prices, wiring, layouts = model.prices, model.wiring, model.ports.layouts(rows)
    made, read = wiring.made[model.problem.numbers.of(prices.own)], array(map(wiring.port, prices.read))
    ports, price, total = np.append(made, read), np.array([*prices.own.values(), *prices.read.values()]), 0.0
    copies = np.arange(ports.size) >= made.size
    there = ~copies | (layouts[ports] != layouts[wiring.every[ports]])
    ports, price = ports[there], price[there]
    spaces, layouts = model.spaces[ports], layouts[ports]
    for alike in grouped(spaces):
        layout = model.distances.every[spaces[alike[0]]]
        held = layout.bytes * layout.shares[layouts[alike]]
        total += float(model.scale.pack(price[alike] * held).sum())
    return total


def _made(model: Model, n: int) -> Iterator[tuple[float, Costs]]:
    """Price per byte, and bytes per joint state, of what a node defines."""
    for p, made in model.wiring.makes(n):
        if price := model.prices.own.get(made, 0.0):
            value = model.problem.numbers.value(made)
            split = model.tables[n].codes[p] < len(value.shape)
            yield price, per_axis(model.mesh, split) * value.bytes
