"""The version of meshdsl, from one place: ``pyproject.toml``."""

import tomllib
from importlib import metadata
from pathlib import Path

_PROJECT = Path(__file__).parents[2] / "pyproject.toml"


def version() -> str:
    """Returns the version of this checkout, or of the installed package that this is."""
    if _PROJECT.is_file():
        project = tomllib.loads(_PROJECT.read_text(encoding="utf-8")).get("project", {})
        if project.get("name") == "meshdsl":
            return str(project["version"])
    return metadata.version("meshdsl")
