"""The programs of ``docs/pmap.md`` run."""

import re
from pathlib import Path

PAGE = (Path(__file__).parents[2] / "docs" / "pmap.md").read_text()


def test_programs_run():
    names = {}
    programs = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    for program in programs:
        exec(program, names)
    assert len(programs) == 2
    assert not names["plan"].notes
