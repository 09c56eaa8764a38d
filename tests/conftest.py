"""Eight virtual devices for every test, and threads enough, set before the backend starts; golden texts."""

import os
from pathlib import Path

import jax
import pytest

from meshdsl.pytest_plugin import UPDATE

jax.config.update("jax_num_cpu_devices", 8)
os.environ["MESHDSL_TOPOLOGIES"] = "nowhere"  # plans are those of the presets, whatever was measured on this machine
os.environ.setdefault("NPROC", "32")  # or kernels and collectives may wait for each other (docs/evidence/fuzz.md)

GOLDEN = Path(__file__).parent / "golden"


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
