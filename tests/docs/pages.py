"""Runs the programs of documentation pages, and compares what they print with the page.

The ``python`` blocks of a page are one program, run block by block in one namespace; a ``text`` block directly below
one is what it prints, ``text varies`` is not compared. Blocks marked ``python no-run`` are of other libraries, or need
what a test does not have.

    python -m tests.docs.pages docs/howto/fsdp.md ...    # replaces printed text by what the programs print now
"""

import contextlib
import io
import re
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^```(?P<info>[^\n]*)\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")  # and pictures
CODE = ("python", "{code-cell} ipython3")  # of pages, and of notebooks
# folders whose pages are programs
RUN = ("start", "concepts", "howto", "coming_from", "frameworks", "run", "reference")


def pages():
    """Returns the pages whose programs run."""
    found = [page for folder in RUN for page in sorted((ROOT / "docs" / folder).glob("*.md"))]
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *found]


@dataclass(frozen=True)
class Block:
    """A block of code, with the text that the page says it prints, and where that text stands in the page."""

    code: str
    printed: str | None
    place: tuple[int, int]


def blocks(text):
    """Returns the blocks of a page that run, in order."""
    found, fences = [], list(FENCE.finditer(text))
    for i, fence in enumerate(fences):
        if fence["info"].strip() not in CODE:
            continue
        below = fences[i + 1] if i + 1 < len(fences) else None
        is_printed = below and below["info"].strip() == "text" and not text[fence.end() : below.start()].strip()
        printed, place = (below["text"], below.span("text")) if is_printed else (None, (0, 0))
        found.append(Block(fence["text"], printed, place))
    return found


def outputs(name, found, names):
    """Runs blocks as one program in the file ``name``, whose names are then in ``names``; returns what each prints."""
    printed = []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / name
        file.write_text("".join(block.code for block in found))  # plans read the lines that they show
        lines = 0
        for block in found:
            out = io.StringIO()
            with contextlib.redirect_stdout(out), contextlib.chdir(folder):
                exec(compile("\n" * lines + block.code, str(file), "exec"), names)
            printed.append(out.getvalue())
            lines += block.code.count("\n")
    return printed


def run(page):
    """Runs a page's program; returns its names, and pairs of what blocks print and what the page says they print."""
    names = {"__name__": page.stem.lower()}
    found = blocks(page.read_text())
    printed = outputs(f"{page.stem.lower()}.py", found, names)
    return names, [(now, block.printed) for now, block in zip(printed, found, strict=True) if block.printed is not None]


def links(text):
    """Returns the targets of a page's links to files, without code."""
    prose = re.sub(r"`[^`\n]*`", "", FENCE.sub("", text))
    return [link for link in LINK.findall(prose) if not re.match(r"[a-z]+:|#", link)]


def rewrite(page):
    """Replaces the printed text of a page by what its program prints."""
    text, found = page.read_text(), blocks(page.read_text())
    printed = outputs(f"{page.stem.lower()}.py", found, {"__name__": page.stem.lower()})
    for block, now in reversed(list(zip(found, printed, strict=True))):
        if block.printed is not None:
            start, end = block.place
            text = text[:start] + now.rstrip() + "\n" + text[end:]
    page.write_text(text)


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        rewrite(Path(argument))
