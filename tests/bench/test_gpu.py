"""The page of runs on a GPU, of whatever ran, and how many processes wait for it."""

import sys

import pytest

from bench import gpu

RAN = {
    **{"predicted": 0.1, "measured": 0.125, "planned": 2e9, "peak": 1e9},
    **{"traced": dict.fromkeys(("products", "copies", "others"), (0.01, 2.0))},
}


def test_the_page_counts_what_ran():
    failed, ratio = {"error": "no result"}, {"ratio": "0.98 (0.97 to 0.99)"}
    whole = {"model": "gpt2-124m", "variants": {gpu.PLANNED: RAN, "auto 0.5": RAN | {"limit": 2e9}, gpu.BOTH: ratio}}
    wider = {"model": "gpt2-124m-50304", "variants": {gpu.PLAIN: RAN, gpu.PLANNED: failed, gpu.BOTH: failed}}
    text = gpu.page([whole, wider])
    assert "1 model trained on one GPU, in 2 cases." in text and "takes 0.98 to 0.98 of the time" in text
    assert "predicted -20% to -20% off" in text and "0.50 to 0.50 of the limit, at 1 limits" in text
    assert "`jax.jit`: `gpt2-124m`;" in text and "planned, optimizer state on the host: `gpt2-124m`, `gpt2" in text
    assert "In short" not in gpu.page([{"model": "vit-l", "variants": {gpu.PLANNED: failed, gpu.BOTH: failed}}])


def test_few_processes_wait_at_once():
    started = list[str]()
    jobs = [("vit-l", str(i)) for i in range(3 * gpu.AT_ONCE)]
    for done, (job, process) in enumerate(gpu.ahead(jobs, lambda name, variant: started.append(variant) or variant)):
        assert job == ("vit-l", str(done)) and process == str(done) and len(started) <= done + gpu.AT_ONCE
    assert len(started) == len(jobs)


@pytest.mark.parametrize(
    ("given", "line"),
    [
        (["gpt2-125m"], "no model 'gpt2-125m'; did you mean 'gpt2-124m'?"),
        (["--page"], "no results in .cache/gpu; run python -m bench.gpu MODEL first"),
        (["vit-l"], "needs a GPU: the first device of jax is of platform 'cpu'"),
    ],
)
def test_what_cannot_run_is_refused_in_a_line(given, line, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(sys, "argv", ["gpu.py", *given])
    monkeypatch.setattr(gpu, "CACHE", tmp_path / "gpu")
    monkeypatch.setattr(gpu, "first_platform", lambda: "cpu")
    with pytest.raises(SystemExit):
        gpu.main()
    assert capsys.readouterr().err.splitlines()[-1].endswith(line) and not (tmp_path / "gpu").exists()
