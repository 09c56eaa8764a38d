"""Step times measured here beside predicted ones: scores, ranking and the page."""

from bench.measured import kendall, page, picture, time_step
from meshdsl.api import Program
from meshdsl.layouts.mesh import Mesh


def fact(name, measured, predicted):
    return {
        **{"name": name, "measured": measured, "fastest": measured, "predicted": predicted, "simulated": predicted},
        **{"sent": 0.0, "gap": 0.0, "steps": 5, "load": 0.5, "machine": "here"},
    }


FOUND = [
    fact("gpt, data", 1.0, 1.1),
    fact("gpt, fsdp", 2.0, 1.0),
    fact("gpt, zero", 1.01, 0.9),
    fact("zoo, bart", 4, 5),
]

OTHERS = [fact("gpt, remat", 1.0, 9.0), fact("zoo, gpt", 1.0, 9.0)]  # neither is a layout of gpt


def test_ranking_leaves_out_what_was_measured_alike():
    assert kendall(FOUND) == (4, 1)  # data and zero are within 2%; fsdp is slower than data, and predicted faster
    assert kendall(FOUND[:1]) == (0, 0)


def test_the_page_says_how_far_predictions_are_off():
    assert "| gpt | 3 | 1 | 1 | 0.00 |" in page([*FOUND, *OTHERS])
    text = page(FOUND)
    assert "4 steps: 18% off in the median" in text
    assert "| gpt, fsdp | 2 s | 2 s | 1 s | -50% |" in text
    assert "| gpt | 3 | 1 | 1 | 0.00 |" in text and "0.5 to 0.5" in text
    assert picture(FOUND).count("<title>") == 4


def test_a_step_is_timed(monkeypatch):
    import jax
    import jax.numpy as jnp

    array = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    program = Program(lambda w, s, x: (w, s, jnp.sum(x @ w) + s.sum()), (array, array, array), {"x": "data=S(0)"})
    found = time_step(program, Mesh(data=2), 3)
    assert 0 < found["fastest"] <= found["measured"] and found["predicted"] > 0
