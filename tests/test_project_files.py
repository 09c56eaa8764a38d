"""The files around the code state one version, and the supported Pythons of one list."""

import re
import tomllib
from pathlib import Path

import meshdsl as md

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_every_file_states_the_version_of_pyproject():
    assert md.__version__ == PROJECT["version"]
    assert re.search(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)[1] == PROJECT["version"]
    assert f"## {PROJECT['version']}" in (ROOT / "CHANGELOG.md").read_text()


def test_what_the_metadata_names_exists():
    assert (ROOT / PROJECT["readme"]).exists()
    assert all((ROOT / name).exists() for name in PROJECT["license-files"])
    assert "Apache License" in (ROOT / "LICENSE").read_text()


def test_the_source_distribution_takes_every_folder_under_version_control():
    grafted = set(re.findall(r"^graft (.*)$", (ROOT / "MANIFEST.in").read_text(), re.MULTILINE))
    folders = {path.name for path in ROOT.iterdir() if path.is_dir() and any(path.rglob("*.py"))}
    generated = {name for name in folders if name.startswith(".") or name in {"build", "dist", "runs"}}
    assert folders - generated <= grafted | {"docs"}
