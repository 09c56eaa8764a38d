"""Metrics sent to trackers: to stand-ins of their packages, and to the packages where they are installed."""

import sys
from types import SimpleNamespace

import pytest

from meshdsl.errors import ArgumentError
from meshdsl.training.observing import trackers as module
from meshdsl.training.observing.trackers import check_trackers, trackers

VALUES = {"loss": 2.5, "tokens/s": 10.0, "input seconds": 0.1}


def send(name, folder, steps):
    with trackers([name, name], folder) as (tracker,):
        for step in steps:
            tracker(step, VALUES)


def test_tensorboard(tmp_path, monkeypatch):
    written = []

    class SummaryWriter:
        def __init__(self, folder, purge_step):
            written.append((folder, purge_step))

        def add_scalar(self, *row):
            written.append(row)

        def close(self):
            written.append("closed")

    monkeypatch.setitem(sys.modules, "tensorboardX", SimpleNamespace(SummaryWriter=SummaryWriter))
    send("tensorboard", tmp_path, [5])
    scalars = [("loss", 2.5, 5), ("tokens_per_s", 10.0, 5), ("input_seconds", 0.1, 5)]
    assert written == [(str(tmp_path / "tensorboard"), 5), *scalars, "closed"]


def test_a_folder_is_one_run_of_wandb(tmp_path, monkeypatch, caplog):
    started, logged = [], []

    class Run:
        def log(self, values, step):
            logged.append((step, values))

        def finish(self):
            raise OSError("no network")

    def init(**options):
        started.append(options)
        return Run()

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    send("wandb", tmp_path, [1, 2])
    send("wandb", tmp_path, [3])
    assert started[0] == started[1] and started[0]["name"] == tmp_path.name and len(started[0]["id"]) == 16
    assert [step for step, _ in logged] == [1, 2, 3] and logged[0][1]["tokens_per_s"] == 10.0
    assert [each.getMessage() for each in caplog.records] == ["WeightsAndBiases: OSError: no network"] * 2


def test_a_package_that_is_missing(monkeypatch):
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(ArgumentError, match=r"--log wandb needs wandb: pip install 'meshdsl\[wandb\]'"):
        check_trackers(["wandb"])


def test_tensorboard_itself(tmp_path):
    pytest.importorskip("tensorboardX")
    send("tensorboard", tmp_path, [1, 2])
    (file,) = (tmp_path / "tensorboard").iterdir()
    assert b"tokens_per_s" in file.read_bytes()


def test_wandb_itself(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    send("wandb", tmp_path, [1, 2])
    assert len(list((tmp_path / "wandb").glob("offline-run-*/*.wandb"))) == 1
