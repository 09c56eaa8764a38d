"""The README's code runs, and prints the plan that stands below it."""

import contextlib
import io
import re
from pathlib import Path

README = (Path(__file__).parent.parent / "README.md").read_text()


def test_the_first_screen_is_ten_lines_and_their_plan(tmp_path):
    code, printed = re.search(r"```python\n(.*?)```\n\n```text\n(.*?)```", README, re.DOTALL).groups()
    assert len(code.strip().splitlines()) == 10
    file = tmp_path / "readme.py"
    file.write_text(code)
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(code, str(file), "exec"), {"__name__": "readme"})
    assert out.getvalue().strip() == printed.strip()
