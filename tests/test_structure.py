"""The structure that ARCHITECTURE.md states: what each package may import, and what keeps the tree navigable."""

import ast
import re
import subprocess
import sys
import tomllib
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import meshdsl
from bench.structure import Tree, imported
from meshdsl import nd
from meshdsl.util.stubs import stub_names

ROOT = Path(__file__).parent.parent
FOLDERS = {
    "meshdsl": "meshdsl",
    "layouts": "meshdsl.layouts",
    "lowering": "meshdsl.lowering",
    "models": "meshdsl.models",
}
NON_TEST_IMPORTERS = ("bench", "examples")  # beside the package itself
LOOSE_MODULES = 6  # files that may lie in meshdsl/ outside of any package
ENTRY_POINTS = {  # modules that something other than an import statement loads
    "meshdsl": "the package itself",
    "meshdsl.__main__": "python -m meshdsl",
    "meshdsl.pytest_plugin": "the entry point pytest11",
    "meshdsl.training.demo": "make demo",
}
PUBLIC_NAME_USERS = ("models", "cli")  # models are written as a user's programs are; the command prints the version
OWN_NAMES = {  # packages whose files may use a class name that another file uses, with the reason
    "models": "every model is one file to be read and copied alone, with layers named as in its paper",
}


@cache
def tree():
    return Tree(ROOT, FOLDERS)


@cache
def graph():
    """Modules of ours that each module imports, also under TYPE_CHECKING and inside functions."""
    return tree().imports()


def package(module):
    """The package of a module, as ARCHITECTURE.md names it: ``meshdsl.planner.memory.fit`` is in ``planner``."""
    return module.split(".")[1] if "." in module else module


def allowed():
    """The table of ARCHITECTURE.md: packages that each package may import."""
    rows = re.findall(
        r"^\| \d+ \| `(\w+)` \|[^|]*\|([^|]*)\|$", (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8"), re.M
    )
    return {name: set(re.findall(r"`(\w+)`", targets)) for name, targets in rows}


def test_packages_import_only_what_the_architecture_allows():
    table, wrong = allowed(), []
    assert {package(module) for module in tree().files} - {"meshdsl"} == set(table)
    for module, targets in graph().items():
        for target in targets:
            own, other = package(module), package(target)
            if other == "meshdsl":  # the public names
                permitted = own in PUBLIC_NAME_USERS
            else:
                permitted = own in (other, "meshdsl") or other in table[own]
            if not permitted:
                wrong.append(f"{module} imports {target}")
    assert wrong == []


def test_the_table_has_no_row_that_is_too_generous():
    used = {name: set() for name in allowed()}
    for module, targets in graph().items():
        if module != "meshdsl":
            used[package(module)] |= {package(target) for target in targets} - {package(module), "meshdsl"}
    assert {name: targets - used[name] for name, targets in allowed().items() if targets - used[name]} == {}


def test_parts_of_training_import_only_those_above_them():
    order = re.findall(
        r"^\| \d+ \| `meshdsl/training/(\w+)/` \|", (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8"), re.M
    )
    assert order
    for module, targets in graph().items():
        for i, name in enumerate(order):
            if module.startswith(f"meshdsl.training.{name}"):
                allowed_parts = {f"meshdsl.training.{above}" for above in order[: i + 1]}
                inside = {".".join(x.split(".")[:3]) for x in targets if x.startswith("meshdsl.training.")}
                assert inside <= allowed_parts, f"{module} imports {inside - allowed_parts}"


def test_packages_are_listed_from_the_bottom_up():
    seen = set()
    for name, targets in allowed().items():
        assert targets <= seen, f"{name} stands above {targets - seen} in the table"
        seen.add(name)


def test_no_file_imports_itself_by_way_of_others():
    try:
        TopologicalSorter(graph()).prepare()
    except CycleError as error:
        pytest.fail(f"an import cycle: {' -> '.join(error.args[1])}")


def test_few_modules_lie_outside_of_packages():
    loose = sorted(file.name for file in (ROOT / "meshdsl").glob("*.py"))
    assert len(loose) <= LOOSE_MODULES, loose


def test_no_class_name_is_defined_twice():
    places = {
        name: [module for module in sorted(found) if package(module) not in OWN_NAMES]
        for name, found in tree().classes().items()
    }
    twice = {name: found for name, found in places.items() if len(found) > 1}
    assert twice == {}


def test_every_module_is_used_by_something_that_is_not_a_test():
    used = {target for targets in graph().values() for target in targets}
    for folder in NON_TEST_IMPORTERS:
        used |= {
            tree().module_of(name)
            for file in (ROOT / folder).rglob("*.py")
            for name in imported(ast.parse(file.read_text()))
        }
    used |= {name for stub in ROOT.glob("meshdsl/**/*.pyi") for name in stub_names(stub).values()}
    makefile = (ROOT / "Makefile").read_text()
    unused = {
        module
        for module, file in tree().files.items()
        if module not in used and file.name != "__init__.py" and f"-m {module} " not in makefile
    }
    assert unused - set(ENTRY_POINTS) == set()


def test_every_package_says_what_it_is_for():
    faces = {module: file for module, file in tree().files.items() if file.name == "__init__.py"}
    assert [module for module, file in faces.items() if not ast.get_docstring(ast.parse(file.read_text()))] == []


def test_files_that_the_architecture_names_exist():
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8") + (ROOT / "CONTRIBUTING.md").read_text(
        encoding="utf-8"
    )
    named = set(re.findall(r"`((?:meshdsl|layouts|lowering|models|tests|bench|examples|docs)/[\w/.-]*)`", text))
    assert named and [name for name in sorted(named) if not (ROOT / name).exists()] == []


def test_layouts_do_not_import_jax():
    imports = ", ".join(module for module in tree().files if package(module) == "layouts")
    code = f"import sys, {imports}; assert not {{'jax', 'numpy'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_no_relative_imports():
    for file in tree().files.values():
        assert not any(isinstance(n, ast.ImportFrom) and n.level for n in ast.walk(ast.parse(file.read_text()))), file


def test_names_of_jax_are_public():
    private = [
        f"{path.relative_to(ROOT)}:{number}"
        for folder in (*FOLDERS, "examples")
        for path in (ROOT / folder).rglob("*.py")
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if re.match(r"\s*(from|import) +(jax\._src|jaxlib)", line)
    ]
    assert private == []


def test_every_package_is_installed():
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    packages = {module for module, file in tree().files.items() if file.name == "__init__.py"}
    assert packages == set(listed)


def test_no_public_name_is_hidden_by_a_module():
    """Importing a module sets an attribute of its package, which ``__getattr__`` is then not asked for any more."""
    for namespace in (meshdsl, nd):
        prefix = f"{namespace.__name__}."
        below = {module.removeprefix(prefix).split(".")[0] for module in tree().files if module.startswith(prefix)}
        names = below & {*stub_names(Path(namespace.__file__).with_suffix(".pyi")), *nd.__all__}
        assert names <= {"nd", "calibrate"}  # the one is meant as a module, the other can be called as one
