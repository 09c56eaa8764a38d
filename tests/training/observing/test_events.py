"""Events of a run, and the downtime that follows from them."""

from meshdsl.training.observing.events import add_event, downtimes, read_events
from meshdsl.training.saving.folder import EVENTS


def events(*rows):
    return [{"time": time, "event": event, **facts} for time, event, facts in rows]


def test_what_is_appended_is_read_but_for_half_a_line(tmp_path):
    assert read_events(tmp_path) == []
    add_event(tmp_path, "launch", mesh="data=2", processes=2)
    with (tmp_path / EVENTS).open("a") as file:
        file.write('{"time": 3, "ev')
    (event,) = read_events(tmp_path)
    assert (event["event"], event["mesh"], event["processes"]) == ("launch", "data=2", 2) and event["time"] > 1e9


def test_every_fault_and_growth_has_its_downtime():
    run = events(
        (0.0, "launch", {}),
        (9.0, "first step", {}),
        (100.0, "fault", {"what": "process 1 ended", "after": 2.0}),
        (101.0, "launch", {}),
        (104.0, "joined", {}),
        (110.0, "fault", {"what": "process 1 ended again", "after": 1.0}),
        (112.0, "planned ahead", {}),
        (113.0, "launch", {}),
        (116.0, "joined", {}),
        (116.5, "planned", {}),
        (118.5, "restored", {}),
        (121.5, "compiled", {}),
        (122.0, "first step", {}),
        (500.0, "stop", {"what": "to start all", "after": 4.0}),
        (501.0, "launch", {}),
        (520.0, "first step", {}),
        (900.0, "stop", {"what": "stopped", "after": 3.0}),
    )
    assert downtimes(run[:2]) == []
    first, second, growth = downtimes(run)
    assert first.time == 98.0 and first.stages == {"detection": 2.0, "launch": 1.0, "start": 3.0}
    assert second.stages == {
        "detection": 1.0,
        "launch": 3.0,
        "start": 3.0,
        "plan": 0.5,
        "restore": 2.0,
        "compile": 3.0,
        "first step": 0.5,
    }
    assert second.seconds == 13.0
    assert str(second).endswith(
        "process 1 ended again: 13 s without steps (detection 1 s, launch 3 s, start 3 s, plan 500 ms, restore 2 s, "
        "compile 3 s, first step 500 ms)"
    )
    assert growth.stages == {"saving": 4.0, "launch": 1.0, "first step": 19.0}
