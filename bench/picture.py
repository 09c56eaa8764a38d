"""Draws the README's picture: the report of the README's own plan, as headless Chromium shows it.

python -m bench.picture writes docs/_static/report.png. Needs playwright and a Chromium.
"""

import tempfile
from pathlib import Path
from shutil import which

from playwright.sync_api import sync_playwright

from meshdsl.plan.plan import Plan
from tests.docs.pages import ROOT, run

PICTURE = ROOT / "docs" / "_static" / "report.png"
WIDTH, HEIGHT = 1120, 760  # of the window, in pixels of CSS


def readme_plan() -> Plan:
    """Returns the plan that the README prints."""
    names, _ = run(ROOT / "README.md")
    array = names["array"]
    return names["sharded"].plan({"up": array(8192, 28672), "down": array(28672, 8192)}, array(65536, 8192))


def main() -> None:
    """Writes the picture."""
    chromium = next(filter(None, map(which, ("chromium", "chromium-browser", "google-chrome"))), None)
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as running:
        file = Path(folder) / "report.html"
        readme_plan().report(file)
        browser = running.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
        page.goto(file.as_uri())
        page.wait_for_selector("#source > :nth-child(2)")
        PICTURE.parent.mkdir(exist_ok=True)
        page.screenshot(path=PICTURE)
        browser.close()


if __name__ == "__main__":
    main()
