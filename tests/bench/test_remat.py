"""The page of recomputation: what is derived from plans and from programs that XLA compiled within limits."""

from math import inf

import pytest

from bench.remat import KEEP_ALL, _by_xla, page

MODEL = {
    "model": "gpt3-175b",
    "plans": {KEEP_ALL: (100.0, 1.0), "full": (30.0, 1.4)},
    "transfer": None,
    "rows": [
        {"share": share, "took": 1.0, "auto": seconds, "gap": 0.0, "policy": "full", "best": 1.4, "search": 3}
        for share, seconds in ((0.9, 1.06), (0.5, 1.2), (0.4, 1.25))
    ],
}
PROGRAMS = [
    {"share": share, "memory": memory, "flops": flops, "computing": seconds, "planned": 1.0, "triton": True}
    | {"planned memory": 160.0}
    for share, memory, flops, seconds in (
        *((None, 200, 1000, 0.5), (0.9, 190, 1100, 0.53)),
        *((0.5, 170, 1300, 0.55), (0.35, 90, 1500, 0.7)),
    )
]


def test_steps_of_programs_that_xla_compiled_within_limits():
    """The plan's seconds and the program's beyond the one without a limit, of any program that fits the share."""
    assert _by_xla(PROGRAMS, 0.9) == pytest.approx(1.05)  # compiled for a tighter limit, which it misses
    assert _by_xla(PROGRAMS, 0.5) == pytest.approx(1.2)
    assert _by_xla(PROGRAMS, 0.4) == inf


def test_the_page_counts_xla_beside_the_plan():
    text = page([MODEL], [], {"xla gpt3-175b": PROGRAMS})
    assert (
        "XLA's own rematerialisation: 1 faster, 1 slower (it fits within 2); the best of all: 1 faster, 1 slower."
        in text
    )
    assert (
        "| Triton | 200 B (1.25) | 95.0%, FLOPs +10%, 30.0 ms | 45.0%, FLOPs +50%, 200 ms | 90%: 1.05 s, 75%: 1.20 s,"
        in text
    )
