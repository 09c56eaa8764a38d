"""A sample of mutated files, and files that are none."""

import os

import pytest

import meshdsl as md
from meshdsl.layouts.topology import load_topology
from meshdsl.schedules.schedule import Schedule
from tests.fuzz.files import sweep


def test_mutated_files_are_errors_or_read_as_they_say():
    wrong = []
    verdicts = sweep(80, 7, wrong.append)
    assert wrong == [] and verdicts["error"] > 20 and verdicts["read"] > 3


@pytest.mark.parametrize("read", [md.load_plan, load_topology, Schedule.load])
def test_devices_pipes_folders_and_huge_files_are_not_read(read, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with (tmp_path / "huge").open("wb") as file:
        file.truncate(20_000_000_000)  # which takes no space
    for path, message in {
        "/dev/zero": "not a regular file",
        tmp_path / "pipe": "not a regular file",
        tmp_path: "Is a directory",
        tmp_path / "huge": "20 GB, more than such a file may have",
    }.items():
        with pytest.raises(md.MeshDSLError, match=message):
            read(path)
