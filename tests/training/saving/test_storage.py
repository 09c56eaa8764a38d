"""Runs in a bucket, and storage that cannot be used. The bucket is one of this process: see ``bucket``."""

import json
import logging
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import fsspec
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshdsl.cli import main
from meshdsl.errors import ArgumentError, CheckpointError
from meshdsl.training.loop import Run
from meshdsl.training.run import check_folder, check_new
from meshdsl.training.saving import storage
from meshdsl.training.saving.checkpoint import FACTS, Checkpoints
from meshdsl.training.saving.folder import FolderLock, check_free
from meshdsl.training.saving.storage import LOCK, Mirror, SharedFile, locate
from tests.training.saving.bucket import served, served_s3
from tests.training.test_command import TINY, losses, run

PLACE = "gs://bucket/runs/a"
STATE = (jnp.arange(512.0).reshape(64, 8), jnp.int32(3))


@pytest.fixture
def bucket(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with served(monkeypatch) as found:
        yield found


@pytest.fixture(params=["gs", "s3"])
def any_bucket(request, monkeypatch, tmp_path):
    """A bucket, and a place in it."""
    monkeypatch.chdir(tmp_path)
    with (served if request.param == "gs" else served_s3)(monkeypatch) as found:
        yield found, f"{request.param}://bucket/runs/a"


def test_a_run_in_a_bucket_goes_on_on_another_machine(any_bucket, tmp_path):
    bucket, place = any_bucket
    status, printed = run("--folder", place, "--steps", 20, "--save-every", 10, "--json")
    assert status == 0 and json.loads(printed)["folder"] == place
    names = {name.removeprefix("runs/a/").partition("/")[0] for name in bucket.objects}
    assert names == {"checkpoints", "metrics.jsonl", "events.jsonl", "plan.json", "curves.png"}  # and no lock
    before = losses(tmp_path / "runs/bucket/runs/a")
    shutil.rmtree(tmp_path / "runs")
    status, printed = run("--folder", place, "--resume", "--steps", 25)
    assert status == 0 and "resumed after step 20" in printed
    assert f"{place}: what is no checkpoint is written to runs/bucket/runs/a" in printed
    found = losses(tmp_path / "runs/bucket/runs/a")
    assert found[:20] == before and len(found) == 25 and max(found[20:]) < before[0]
    assert bucket.objects["runs/a/metrics.jsonl"][0] == (tmp_path / "runs/bucket/runs/a/metrics.jsonl").read_bytes()
    with pytest.raises(ArgumentError, match=f"^{place} holds a run: --resume continues it"):
        run("--folder", place)


def test_a_checkpoint_is_completed_after_the_metrics_beside_it(bucket, tmp_path):
    (tmp_path / "local").mkdir()
    (tmp_path / "local" / "metrics.jsonl").write_text("1\n")
    mirror = Mirror(tmp_path / "local", PLACE)

    def publish():
        assert not any("10/commit_success" in name for name in bucket.objects)
        mirror.publish()

    with Checkpoints(f"{PLACE}/checkpoints", publish=publish) as checkpoints:
        checkpoints.save(10, STATE)
    assert bucket.objects["runs/a/metrics.jsonl"][0] == b"1\n" and checkpoints.newest == 10
    bucket.fault = 403, "alice does not have storage.objects.create access"
    with pytest.raises(CheckpointError) as error, Checkpoints(f"{PLACE}/checkpoints") as checkpoints:
        checkpoints.save(20, STATE)
    assert "alice does not have storage.objects.create access" in str(error.value) and "\n" not in str(error.value)


def damage(bucket, step):
    """Flips a bit of the largest object of a state."""
    name = max((n for n in bucket.objects if f"/{step}/state" in n), key=lambda n: len(bucket.objects[n][0]))
    content = bytearray(bucket.objects[name][0])
    content[len(content) // 2] ^= 1
    bucket.put(name, content)


def test_a_damaged_checkpoint_in_a_bucket_is_set_aside(bucket, caplog):
    with Checkpoints(PLACE) as checkpoints:
        for step in (10, 20):
            checkpoints.save(step, STATE)
    damage(bucket, 20)
    with caplog.at_level(logging.WARNING, "meshdsl"), Checkpoints(PLACE) as checkpoints:
        step, found = checkpoints.restore_newest(jax.eval_shape(lambda: STATE))
        assert step == checkpoints.newest == 10
        np.testing.assert_array_equal(found[0], STATE[0])
    assert "the checkpoint after step 20 is damaged" in caplog.text and "it is now damaged-20" in caplog.text


def test_copies_of_checkpoints(monkeypatch, tmp_path, caplog):
    """A copy without the file that is written last is none, and of a damaged one the one before it is used."""
    with served_s3(monkeypatch) as bucket:
        run = Run(0, tmp_path / "here", bucket="s3://bucket/runs/a", keep=3, keep_every=20)
        with run.checkpoints() as checkpoints:
            for step in (10, 20, 30, 40, 50, 60):
                checkpoints.save(step, STATE)
        steps = {name.removeprefix("runs/a/checkpoints/").partition("/")[0] for name in bucket.objects}
        assert steps == {"20", "40", "50", "60"} == {each.name for each in (tmp_path / "here/checkpoints").iterdir()}
        bucket.delete(f"runs/a/checkpoints/60/{FACTS}")
        damage(bucket, 50)
        there = replace(run, folder=tmp_path / "there")
        there.fetch()
        assert {each.name for each in (tmp_path / "there/checkpoints").iterdir()} == {"40", "50"}
        with caplog.at_level(logging.WARNING, "meshdsl"), there.checkpoints() as checkpoints:
            step, found = checkpoints.restore_newest(jax.eval_shape(lambda: STATE))
            assert step == 40 and "the checkpoint after step 50 is damaged" in caplog.text
            np.testing.assert_array_equal(found[0], STATE[0])
        bucket.fault = 403, "AccessDenied"
        with pytest.raises(CheckpointError, match=r"AccessDenied.*aws configure"), there.checkpoints() as checkpoints:
            checkpoints.save(70, STATE)
        assert not (tmp_path / "there/checkpoints/70").exists()


def test_copies_and_what_is_here_are_of_one_run(monkeypatch, tmp_path, caplog):
    with served_s3(monkeypatch) as bucket:
        run = Run(0, tmp_path / "here", bucket="s3://bucket/runs/a", keep=1)

        def save(run, *steps):
            with run.checkpoints() as checkpoints:
                for step in steps:
                    checkpoints.save(step, STATE)

        def names(folder):
            return {each.name for each in (folder / "checkpoints").iterdir()}

        save(run, 10, 20)
        bucket.put("runs/a/checkpoints/17/state/x", b"of a copy that was not completed")
        there = replace(run, folder=tmp_path / "there")
        save(there, 5, 15)  # it does not fetch, as another run in the emptied bucket would not
        copies = {name.split("/")[3] for name in bucket.objects if "/checkpoints/" in name}
        assert copies == {"15"}  # neither later ones, nor what is left of one
        with caplog.at_level(logging.WARNING, "meshdsl"):
            run.fetch()
        assert names(run.folder) == {"stale-20", "15"} and "is of another run" in caplog.text
        there.fetch()
        assert names(there.folder) == {"15"}
        bucket.objects.clear()
        monkeypatch.chdir(tmp_path)
        with pytest.raises(ArgumentError, match="there holds a run: --resume continues it"):
            check_folder(there.folder, False, there.bucket)


def test_a_bucket_is_held_by_one_run(any_bucket):
    bucket, place = any_bucket
    with FolderLock(place) as lock:
        with pytest.raises(ArgumentError, match=f"^{place} is in use by process "):
            check_free(place)
        assert lock._lost() == ""
        file = SharedFile(place, LOCK)
        content, generation = file.read()
        assert file.replace(b"{}", generation) and not file.replace(b"{}", generation)
        assert lock._lost() == "was taken by another run"
        file.replace(content, file.read()[1])
        assert lock._lost() == ""
    assert not bucket.objects


def test_what_another_machine_wrote_is_fetched(bucket, tmp_path):
    here = tmp_path / "here"
    mirror = Mirror(here, PLACE)
    bucket.put("runs/a/metrics.jsonl", b"1\n2\n")
    bucket.put("runs/a/wandb-id", b"a")
    bucket.put("runs/a/checkpoints/10/facts", b"")
    mirror.fetch()
    assert {each.name: each.read_text() for each in here.iterdir()} == {"metrics.jsonl": "1\n2\n", "wandb-id": "a"}
    (here / "metrics.jsonl").write_text("1\n2\n3\n")  # which this machine had no time to copy
    mirror.fetch()
    assert (here / "metrics.jsonl").read_text() == "1\n2\n3\n"
    bucket.put("runs/a/metrics.jsonl", b"1\n2\n4\n5\n")
    mirror.fetch()
    assert (here / "metrics.jsonl").read_text() == "1\n2\n4\n5\n"
    generations = {name: found[1] for name, found in bucket.objects.items()}
    mirror.publish()
    mirror.publish()
    assert bucket.objects["runs/a/metrics.jsonl"][1] == max(generations.values()) + 1


def test_places(tmp_path):
    assert locate("runs/a") == (Path("runs/a"), "")
    assert locate("file:///data/a") == locate("file:/data/a") == (Path("/data/a"), "")
    with pytest.raises(ArgumentError, match="--folder gs://: there is no bucket; write gs://bucket/run"):
        locate("gs://")
    (tmp_path / "a[1]" / "checkpoints" / "10").mkdir(parents=True)
    with pytest.raises(ArgumentError, match="holds a run"):
        check_new(tmp_path / "a[1]")
    assert locate("gs://bucket/a/b/") == (Path("runs/bucket/a/b"), "gs://bucket/a/b")


def refused(monkeypatch, capsys, place):
    monkeypatch.setattr(sys, "argv", ["meshdsl", "train", TINY, "--folder", place, "--steps", "3"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert "Traceback" not in said
    return said.removeprefix("meshdsl: ").strip()


def test_storage_that_cannot_be_used_is_one_line(bucket, monkeypatch, capsys, nothing_is_compiled):
    said = refused(monkeypatch, capsys, "az://bucket/run")
    assert said.startswith("--folder az://bucket/run: runs are in folders, gs:// and s3://, not in az://\n")
    bucket.fault = 401, "Anonymous caller does not have storage.objects.get access"
    remedy = "gcloud auth application-default login, or set GOOGLE_APPLICATION_CREDENTIALS"
    assert refused(monkeypatch, capsys, PLACE) == (
        f"{PLACE} cannot be the folder of a run: Anonymous caller does not have storage.objects.get access; {remedy}"
    )
    bucket.fault = 503, "later"
    monkeypatch.setattr(storage, "DEADLINE", 0.5)
    said = refused(monkeypatch, capsys, PLACE)
    assert said.endswith("no answer within 0.5 s; check the network, and that there are credentials")
    bucket.fault = None

    def missing(protocol):
        raise ImportError("Please install gcsfs to access Google Storage")

    monkeypatch.setattr(fsspec, "get_filesystem_class", missing)
    said = refused(monkeypatch, capsys, PLACE)
    assert said.endswith(": Please install gcsfs to access Google Storage; pip install 'meshdsl[gcs]'")


def test_a_bucket_that_is_not_there(any_bucket, monkeypatch, capsys):
    place = any_bucket[1].replace("bucket", "bukcet")
    said = refused(monkeypatch, capsys, place)
    why = "The specified bucket does not exist" if place.startswith("gs") else "NoSuchBucket: NoSuchBucket"
    assert said == f"{place} cannot be the folder of a run: {why}; make it, or correct its name"
