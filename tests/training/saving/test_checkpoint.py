"""Checkpoints that are damaged, not finite, in the background, on another mesh, or have no place."""

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager, nullcontext
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from meshdsl.errors import CheckpointError, NonFiniteError
from meshdsl.training.batches import host_feed
from meshdsl.training.loop import Run, restore_newest, train
from meshdsl.training.saving import checkpoint, digests
from meshdsl.training.saving.checkpoint import Checkpoints
from meshdsl.training.saving.digests import Digests, snapshot

ROOT = Path(__file__).parents[3]
SHAPES = (jax.ShapeDtypeStruct((64, 8), jnp.float32), jax.ShapeDtypeStruct((), jnp.int32))


def state(step):
    return jnp.arange(512.0).reshape(64, 8) + step, jnp.int32(step)


@pytest.fixture
def saved(tmp_path):
    with Checkpoints(tmp_path, keep=3) as checkpoints:
        for step in (10, 20):
            checkpoints.save(step, state(step))
    return tmp_path


def arrays_of(folder: Path) -> Path:
    """The largest file of a checkpoint: the one with the arrays."""
    return max((file for file in folder.rglob("*") if file.is_file()), key=lambda file: file.stat().st_size)


def flip_a_byte(folder):
    file = arrays_of(folder)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def truncate(folder):
    os.truncate(arrays_of(folder), 10)


def empty_manifests(folder):
    for file in folder.rglob("manifest.ocdbt"):
        file.write_bytes(b"")


def replace_in(file, before, after):
    assert before in file.read_text()
    file.write_text(file.read_text().replace(before, after))


def other_digests(folder):
    facts = {"digests": {"0": "00000000"}}
    (folder / "facts" / "facts.json").write_text(json.dumps({**facts, "seal": checkpoint._seal(facts)}))


DAMAGES = {
    "a flipped byte": flip_a_byte,
    "a truncated file": truncate,
    "a removed file": lambda folder: arrays_of(folder).unlink(),
    "a broken manifest": empty_manifests,
    "no metadata": lambda folder: (folder / "state" / "_METADATA").write_text("{"),
    "no facts": lambda folder: (folder / "facts" / "facts.json").unlink(),
    "facts that are not JSON": lambda folder: (folder / "facts" / "facts.json").write_text("[1"),
    "other digests": other_digests,
    "a changed fact": lambda folder: replace_in(folder / "facts" / "facts.json", '"jax"', '"jay"'),
    "an empty folder": lambda folder: [shutil.rmtree(each) for each in folder.iterdir() if each.is_dir()],
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_restored(saved, damage, caplog):
    DAMAGES[damage](saved / "20")
    with caplog.at_level(logging.WARNING, "meshdsl"), Checkpoints(saved) as checkpoints:
        step, found = checkpoints.restore_newest(SHAPES)
        assert step == checkpoints.newest == 10
        np.testing.assert_array_equal(found[0], state(10)[0])
    (line,) = [record.getMessage() for record in caplog.records if record.name == "meshdsl"]
    assert line.startswith("the checkpoint after step 20 is damaged: ") and line.endswith("; it is now damaged-20")
    assert "\n" not in line and (saved / "damaged-20").is_dir()
    with Checkpoints(saved) as checkpoints:  # the next run may reach that step again
        checkpoints.save(20, state(20))
        assert checkpoints.restore_newest(SHAPES)[0] == 20


def test_devices_without_memory_damage_no_checkpoint(saved, monkeypatch):
    def restore(*_, **__):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

    with Checkpoints(saved) as checkpoints:
        monkeypatch.setattr(checkpoint.ocp.StandardCheckpointHandler, "restore", restore)
        with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
            checkpoints.restore_newest(SHAPES)
    assert {"10", "20"} <= {each.name for each in saved.iterdir()}


def test_digests_do_not_depend_on_layouts_and_see_every_bit():
    mesh = jax.make_mesh((4, 2), ("a", "b"))
    x = np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)
    specs = [PartitionSpec(), PartitionSpec("a"), PartitionSpec(("b", "a")), PartitionSpec("b", "a")]
    placed = {str(spec): jax.device_put(x, NamedSharding(mesh, spec)) for spec in specs}
    digests, bad = Digests(placed).result()
    assert len(set(digests.values())) == 1 and not bad
    assert Digests(snapshot(placed), in_parts=True).result() == (digests, bad)
    hosted = jax.device_put(x, NamedSharding(mesh, PartitionSpec("b"), memory_kind="pinned_host"))
    assert Digests({"": hosted}).result()[0][""] in digests.values()
    changed = {}
    for i in range(32 * x.size):
        bits = x.view(np.uint32).copy()
        bits.flat[i // 32] ^= np.uint32(1 << i % 32)
        changed[str(i)] = bits
    names = {**changed, "swapped": x[::-1].copy().view(np.uint32), "same": x.view(np.uint32)}
    found = Digests({name: jnp.asarray(bits) for name, bits in names.items()}).result()[0]
    assert found.pop("same") in digests.values()
    assert not {*found.values()} & {*digests.values()}


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "int4", "bool", "complex64", "uint8", "key"])
def test_every_dtype_has_a_digest_and_comes_back(tmp_path, dtype):
    x = jax.random.split(jax.random.key(0), 6) if dtype == "key" else jnp.array([0, 1, 1, 0, 1, 0]).astype(dtype)
    places = NamedSharding(jax.make_mesh((2, 3), ("a", "b")), PartitionSpec("b"))
    assert Digests(snapshot({"x": jax.device_put(x, places)}), in_parts=True).result() == Digests({"x": x}).result()
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, (x,))
    with Checkpoints(tmp_path) as checkpoints:
        ((found,),) = checkpoints.restore_newest(jax.eval_shape(lambda: (x,)))[1:]
    assert found.dtype == x.dtype and (found == x).all()


def test_what_is_saved_in_the_background_is_the_state_that_was_given(tmp_path):
    mesh = jax.make_mesh((8,), ("data",))
    places = [NamedSharding(mesh, PartitionSpec(*spec)) for spec in (("data",), ())]
    xs = [jax.device_put(jnp.arange(2.0**18), place) for place in (*places, jax.devices()[0])]
    overwrite = jax.jit(lambda x: x * 2 - 1, donate_argnums=0)
    for step in (1, 2):
        given = [np.array(x) for x in xs]
        with Checkpoints(tmp_path) as checkpoints:
            checkpoints.save(step, (xs,))
            for _ in range(3):
                xs = [overwrite(x) for x in xs]
        with Checkpoints(tmp_path) as checkpoints:
            _, (found,) = checkpoints.restore_newest((xs,))
        for x, y in zip(found, given, strict=True):
            np.testing.assert_array_equal(x, y)


def test_of_one_process_on_cpu_a_thread_saves_and_lets_devices_exchange_nothing(tmp_path, monkeypatch):
    """Programs that exchange data, started by two threads, may wait for each other for ever."""
    mesh = jax.make_mesh((4, 2), ("a", "b"))
    x = jax.device_put(jnp.ones((8, 8)), NamedSharding(mesh, PartitionSpec("b")))
    assert "all-reduce" in digests._digests.lower([x]).compile().as_text()
    text = digests._rows_of_devices.lower([x], x.sharding).compile().as_text()
    assert not [kind for kind in ("all-", "reduce-scatter", "collective", "send") if kind in text]
    threads = []
    with Checkpoints(tmp_path) as checkpoints:
        monkeypatch.setattr(checkpoints, "_save", lambda *_: threads.append(threading.current_thread()))
        checkpoints.save(1, (x,))
        checkpoints.wait()
        checkpoints.save(2, (np.ones(3), x))  # which its owner may change
        monkeypatch.setattr(jax, "process_count", lambda: 2)
        monkeypatch.setattr(checkpoints, "_check_space", lambda arrays: None)
        checkpoints.save(3, (x,))
        monkeypatch.undo()
    here = threading.current_thread()
    assert [each is here for each in threads] == [False, True, True]


def test_an_error_before_anything_is_written_is_raised_by_the_next_look_at_the_checkpoints(saved, monkeypatch):
    def save(*_, **__):
        raise OSError(28, "No space left on device")

    with Checkpoints(saved) as checkpoints:
        monkeypatch.setattr(checkpoints._manager, "save", save)
        for look in (lambda: checkpoints.newest, lambda: checkpoints.save(40, state(40)), checkpoints.wait):
            checkpoints.save(30, state(30))
            with pytest.raises(CheckpointError) as error:
                look()
            what = f"{saved} cannot hold the state after step 30: No space left on device: "
            assert str(error.value).startswith(what) and str(error.value).endswith(
                "; the newest checkpoint is after step 20"
            )
            assert checkpoints.newest == 20


def test_only_complete_checkpoints_count_as_the_newest(tmp_path):
    complete = threading.Event()
    with Checkpoints(tmp_path, publish=complete.wait) as checkpoints:
        checkpoints.save(10, state(10))
        threading.Timer(0.3, complete.set).start()
        assert checkpoints.newest == 10 and complete.is_set() and (tmp_path / "10" / "facts" / "facts.json").exists()


def test_the_last_step_is_saved_once(tmp_path, monkeypatch):
    steps, save = [], Checkpoints.save
    monkeypatch.setattr(Checkpoints, "save", lambda self, step, state: (steps.append(step), save(self, step, state)))
    train(lambda x, batch: (x + 1, x), (jnp.float32(0),), host_feed([0] * 10), Run(10, tmp_path, save_every=5))
    assert steps == [5, 10]


KILLED = """
import os, signal, sys
import jax.numpy as jnp
from meshdsl.training.saving.checkpoint import Checkpoints

state = jnp.arange(512.0).reshape(64, 8)
with Checkpoints(sys.argv[1]) as checkpoints:
    checkpoints.save(10, (state + 10, jnp.int32(10)))
with Checkpoints(sys.argv[1], publish=lambda: os.kill(os.getpid(), signal.SIGKILL)) as checkpoints:
    checkpoints.save(20, (state + 20, jnp.int32(20)))
"""


def test_a_process_that_is_killed_while_it_saves_leaves_the_checkpoint_before(tmp_path):
    script = [sys.executable, "-c", KILLED, str(tmp_path)]
    ended = subprocess.run(script, cwd=ROOT, env={"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}, timeout=120)
    assert ended.returncode == -signal.SIGKILL
    with Checkpoints(tmp_path) as checkpoints:
        step, found = checkpoints.restore_newest(SHAPES)
    assert step == 10
    np.testing.assert_array_equal(found[0], state(10)[0])


def test_saving_does_not_take_part_in_the_agreement_of_processes_to_stop(tmp_path, monkeypatch):
    """jax would take the step, asked for by a thread of orbax, for the dispatch that the process has come to."""
    monkeypatch.setattr("jax.experimental.multihost_utils.reached_preemption_sync_point", pytest.fail)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(10, state(10))
        checkpoints.save(20, state(20))
    assert checkpoints.newest == 20


def test_a_state_that_is_not_finite_is_never_saved_over_a_good_one(saved):
    bad = (state(30)[0].at[3, 4].set(jnp.nan), jnp.int32(30))
    message = "the state after step 30 is not saved: NaNs or infinities in 0"
    with pytest.raises(NonFiniteError, match=message), Checkpoints(saved, keep=1) as checkpoints:
        checkpoints.save(30, bad)
    with Checkpoints(saved) as checkpoints:
        assert checkpoints.newest == 20 and checkpoints.restore_newest(SHAPES)[0] == 20
    with Checkpoints(saved, only_finite=False) as checkpoints:
        checkpoints.save(30, bad)
    with Checkpoints(saved) as checkpoints:
        assert jnp.isnan(checkpoints.restore_newest(SHAPES)[1][0]).sum() == 1


def test_a_loss_that_is_not_finite_ends_the_run(tmp_path):
    def step(x, batch):
        return x + 1, jnp.where(x < 7, x, jnp.nan)

    run = Run(steps=20, folder=tmp_path, save_every=5)
    with pytest.raises(NonFiniteError, match="the loss of step 8 is nan; the newest checkpoint is after step 5"):
        train(step, (jnp.float32(0),), host_feed([0] * 20), run)
    assert restore_newest(run, (jnp.float32(0),))[0] == 5
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["step"] == 8 and lines[-1]["loss"] is None
    _, outcome = train(
        step, (jnp.float32(0),), host_feed([0] * 20), Run(10, tmp_path / "b", stops_on_nan=False, saves_non_finite=True)
    )
    assert outcome.done == 10 and np.isnan(outcome.history.losses[-1])


def test_a_state_that_was_refused_is_not_named_as_the_newest_checkpoint(tmp_path):
    def step(x, batch):
        return jnp.where(x < 7, x + 1, jnp.nan), x

    with pytest.raises(NonFiniteError, match="the state after step 8 is not saved: NaNs or infinities in 0"):
        train(step, (jnp.float32(0),), host_feed([0] * 20), Run(steps=20, folder=tmp_path, save_every=4))
    assert (tmp_path / "checkpoints" / "4").is_dir() and not (tmp_path / "checkpoints" / "8").exists()


def test_batches_that_fail_end_the_run_after_the_state_is_saved(tmp_path):
    def batches():
        yield from range(7)
        raise OSError("the disk of the data is gone")

    run = Run(steps=20, folder=tmp_path, save_every=5)
    with pytest.raises(OSError, match="the disk of the data is gone"):
        train(lambda x, batch: (x + 1, x), (jnp.float32(0),), host_feed(batches()), run)
    assert restore_newest(run, (jnp.float32(0),))[0] == 7


def test_one_process_of_several_whose_batches_fail_does_not_wait_for_the_others_to_save(tmp_path, monkeypatch):
    def batches():
        yield from range(7)
        monkeypatch.setattr(jax, "process_count", lambda: 2)
        raise OSError("the disk of the data is gone")

    saves = []
    monkeypatch.setattr(checkpoint.Checkpoints, "save", lambda self, step, state: saves.append(step))
    with pytest.raises(OSError, match="the disk of the data is gone"):
        train(lambda x, batch: (x + 1, x), (jnp.float32(0),), host_feed(batches()), Run(20, tmp_path, save_every=50))
    assert not saves


def test_more_checkpoints_are_kept_where_asked(tmp_path):
    with Checkpoints(tmp_path, keep=2, keep_every=20) as checkpoints:
        for step in range(10, 70, 10):
            checkpoints.save(step, state(step))
    assert sorted(int(p.name) for p in tmp_path.iterdir() if p.name.isdigit()) == [20, 40, 50, 60]


def test_a_full_disk_and_a_folder_that_cannot_be_written(saved, monkeypatch):
    usage = shutil.disk_usage(saved)
    monkeypatch.setattr(checkpoint, "disk_usage", lambda folder: usage._replace(free=1000))
    with Checkpoints(saved) as checkpoints, pytest.raises(CheckpointError, match="1 kB free, and a checkpoint needs 2"):
        checkpoints.save(30, state(30))
    with pytest.raises(CheckpointError, match="/proc/run cannot hold checkpoints: "):
        Checkpoints("/proc/run")


@contextmanager
def small_disk(folder, size):
    """A file system of its own in a folder, where this process may mount one."""
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], capture_output=True).returncode:
        pytest.skip("only root mounts file systems")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def test_a_disk_that_is_full_while_a_checkpoint_is_written(tmp_path, caplog):
    x = jax.random.normal(jax.random.key(0), (256, 1024))  # 1 MB, which no compression makes smaller
    with small_disk(tmp_path / "disk", "3m"):
        checkpoints = Checkpoints(tmp_path / "disk" / "run")
        checkpoints.save(10, (x,))
        checkpoints.wait()
        checkpoints._check_space = lambda arrays: (tmp_path / "disk" / "other").write_bytes(bytes(1_500_000))
        checkpoints.save(20, (x,))
        with pytest.raises(CheckpointError) as error:
            checkpoints.wait()
        checkpoints.close()
        kept = f"{tmp_path / 'disk' / 'run'} cannot hold the newest state: No space left on device: make room, or give"
        assert str(error.value) == f"{kept} another folder; the newest checkpoint is after step 10"
        assert [each.name for each in (tmp_path / "disk" / "run").iterdir()] == ["10"]
        assert not any(record.exc_info for record in caplog.records)
        with Checkpoints(tmp_path / "disk" / "run") as checkpoints:
            assert checkpoints.restore_newest((x,))[0] == 10


def test_a_folder_that_is_removed_while_a_run_trains(saved):
    with Checkpoints(saved) as checkpoints:
        shutil.rmtree(saved)
        with pytest.raises(CheckpointError) as error:
            checkpoints.save(30, state(30))
    assert str(error.value).startswith(f"{saved} cannot hold the newest state: [Errno 2] No such file or directory")
    assert "\n" not in str(error.value)


def test_tracebacks_of_others_are_logged(saved, caplog):
    others = logging.getLogger("absl")
    before = [*others.filters]
    with Checkpoints(saved), Checkpoints(saved):
        try:
            raise OSError("of another library")
        except OSError:
            others.exception("said")
    assert [record.getMessage() for record in caplog.records] == ["said"] and others.filters == before


def test_of_several_processes_the_first_says_whether_the_disk_has_room(saved, monkeypatch):
    said = []
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(checkpoint.multihost_utils, "broadcast_one_to_all", lambda _: np.array(said, np.uint32))
    checkpoints = Checkpoints.__new__(Checkpoints)
    checkpoints.folder = saved
    for free in (1000, 2**40 + 5):
        said[:] = np.array([free], np.int64).view(np.uint32).tolist()
        with nullcontext() if free > 2**40 else pytest.raises(CheckpointError, match="has 1 kB free, and a checkpoint"):
            checkpoints._check_space({"w": jnp.ones(1000)})
    said[:] = np.array([-1], np.int64).view(np.uint32).tolist()
    with pytest.raises(CheckpointError, match="cannot hold the newest state: another process says why"):
        checkpoints._check_space({"w": jnp.ones(1000)})


def test_a_process_that_ends_with_an_error_does_not_wait_for_a_save_that_others_cannot_complete(
    saved, monkeypatch, caplog
):
    ended = threading.Event()
    checkpoints = Checkpoints(saved)
    monkeypatch.setattr(checkpoints._manager, "wait_until_finished", ended.wait)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(checkpoint, "_LAST", 0.1)
    with pytest.raises(OSError, match="No space left"), checkpoints:
        raise OSError("No space left on device")
    assert "what other processes do not save is not completed" in caplog.text
    ended.set()


def test_nothing_starts_from_the_beginning_because_all_is_damaged(saved):
    """Nor is anything renamed: the storage may only have failed for a while."""
    for step in ("10", "20"):
        flip_a_byte(saved / step)
    with Checkpoints(saved) as checkpoints:
        for _ in range(2):
            with pytest.raises(CheckpointError, match=r"none can be read now:\n  after step 20: .*\n  after step 10"):
                checkpoints.restore_newest(SHAPES)
    assert {"10", "20"} <= {each.name for each in saved.iterdir()}


def test_a_step_before_the_newest_is_not_silently_left_unsaved(saved):
    with (
        Checkpoints(saved) as checkpoints,
        pytest.raises(CheckpointError, match="after step 20, and step 15 is no later"),
    ):
        checkpoints.save(15, state(15))


def test_a_signal_ends_a_run_whose_input_is_stuck(tmp_path):
    steps = []

    def batches():
        yield from range(3)
        while len(steps) < 3:  # this thread reads ahead
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(1000)

    def step(x, batch):
        steps.append(batch)
        return x + 1, x

    run = Run(steps=20, folder=tmp_path)
    _, outcome = train(step, (jnp.float32(0),), host_feed(batches()), run)
    assert (outcome.done, outcome.stopped) == (3, signal.SIGTERM)
    assert restore_newest(run, (jnp.float32(0),))[0] == 3
