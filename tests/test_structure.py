"""The import direction, and that the layout algebra stands without jax."""

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import meshdsl

ROOT = Path(__file__).parent.parent
LAYERS = [
    ("meshdsl.errors",),
    ("meshdsl.util", "meshdsl.layouts", "meshdsl.schedules"),
    ("meshdsl.ir", "meshdsl.primitives"),
    ("meshdsl.rules", "meshdsl.dsl"),
    ("meshdsl.trace", "meshdsl.custom_rules"),
    ("meshdsl.pins", "meshdsl.planner", "meshdsl.lowering", "meshdsl.padding", "meshdsl.plan"),
    ("meshdsl.pipelining",),
    ("meshdsl.api", "meshdsl.calibrate", "meshdsl.pytest_plugin"),
    ("meshdsl.training",),
    ("meshdsl.cli", "meshdsl.__main__"),
    ("meshdsl.models", "examples"),
]


def layer(module):
    found = [i for i, names in enumerate(LAYERS) if any(module == n or module.startswith(n + ".") for n in names)]
    return found[0] if found else None


def modules():
    folders = {
        "meshdsl": "meshdsl",
        "layouts": "meshdsl.layouts",
        "lowering": "meshdsl.lowering",
        "models": "meshdsl.models",
    }
    for folder, package in folders.items():
        for file in sorted((ROOT / folder).rglob("*.py")):
            inner = file.relative_to(ROOT / folder).with_suffix("").parts
            yield ".".join([package, *(p for p in inner if p != "__init__")]), file


def imports(file):
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def test_imports_go_one_way():
    wrong = []
    for module, file in modules():
        if module == "meshdsl":
            continue
        assert layer(module) is not None, f"{module} has no layer in this test"
        for name in imports(file):
            if name.startswith("meshdsl.") and layer(name) is not None and layer(name) > layer(module):
                wrong.append(f"{module} imports {name}")
    assert wrong == []


def test_layouts_do_not_import_jax():
    code = "import sys, meshdsl.layouts.reshard; assert not {'jax', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_no_relative_imports():
    for _, file in modules():
        assert not any(isinstance(n, ast.ImportFrom) and n.level for n in ast.walk(ast.parse(file.read_text()))), file


def test_every_package_is_installed():
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    packages = {module for module, file in modules() if file.name == "__init__.py"}
    assert packages == set(listed)


def test_no_public_name_is_a_module():
    """A module that is imported hides a name of ``meshdsl.__getattr__``."""
    below = {module.split(".")[1] for module, _ in modules() if module.count(".") >= 1}
    assert not below & set(meshdsl.__all__)
