"""Eight virtual devices for every test, and threads enough, set before the backend starts; golden texts."""

import gc
import os
from pathlib import Path

import jax
import pytest

from meshdsl.api.sharded import Sharded
from meshdsl.pytest_plugin import UPDATE
from tests.quick_compiles import compile_quickly

jax.config.update("jax_num_cpu_devices", 8)
os.environ["MESHDSL_TOPOLOGIES"] = "nowhere"  # plans are those of the presets, whatever was measured on this machine
os.environ.setdefault("NPROC", "32")  # or kernels and collectives may wait for each other (docs/evidence/fuzz.md)

compile_quickly()

GOLDEN = Path(__file__).parent / "golden"
SUMS_CHECKED = (  # modules whose ``verify`` also checks sums, together every form of lowering; the others save the time
    *("test_sums", "test_rings", "test_buckets", "test_composites", "test_halos_on_two_axes", "test_stencils"),
    *("test_loop_pitfalls", "test_resized_dims", "test_accumulate", "test_cut_stages", "test_shard_map_rows"),
    *("test_stage_shard_maps", "test_random", "test_overlap", "test_partial_sum_casts"),
)


def pytest_collection_finish():
    """The garbage collector leaves out what stays, and runs less often, which saves a twentieth of the time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 10, 10)


@pytest.fixture(autouse=True)
def sums_unchecked(request, monkeypatch):
    """``verify`` checks the sums of steps only in some modules, and in documents."""
    name = request.module.__name__ if request.module else ""
    if not name.startswith("tests.docs") and name.rsplit(".", 1)[-1] not in SUMS_CHECKED:
        monkeypatch.setitem(Sharded.verify.__kwdefaults__, "sums", 0.0)


@pytest.fixture
def golden(request):
    """``golden("name.txt", text)`` compares a text with the file of that name, or writes it."""

    def compare(name, text):
        file = GOLDEN / name
        if request.config.getoption(UPDATE):
            file.parent.mkdir(exist_ok=True)
            file.write_text(text)
        assert file.exists(), f"{file.name} is missing; pytest {UPDATE} writes it"
        assert text == file.read_text()

    return compare


@pytest.fixture
def nothing_is_compiled(monkeypatch):
    """No test that uses this may reach the compiler."""

    def refuse(*args, **kwargs):
        raise AssertionError("compiled")

    monkeypatch.setattr(jax.stages.Lowered, "compile", refuse)
