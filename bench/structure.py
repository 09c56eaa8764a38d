"""Figures of the tree's structure, for the last section of ARCHITECTURE.md.

python -m bench.structure [CHECKOUT ...]

One column per checkout (this one by default), so that two states of the tree are counted by the same rules:

* files, lines: Python files of ``meshdsl/``, ``layouts/`` and ``lowering/``;
* floors: the longest chain of imports between packages, where a module outside of any package counts as a
  package of its own, and packages that import each other count as one;
* cycles: groups of files that import each other, at any depth;
* small functions: function definitions of at most four lines, docstring and signature included;
* tuning constants: numbers in module-level assignments of the planner outside of ``limits.py``;
* class names of two meanings: names of classes that more than one file defines.
"""

import argparse
import ast
from collections.abc import Iterator, Mapping
from graphlib import TopologicalSorter
from pathlib import Path
from statistics import median

from bench.report import table

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = {"meshdsl": "meshdsl", "layouts": "meshdsl.layouts", "lowering": "meshdsl.lowering"}
SMALL = 4  # lines of a small function
Edges = Mapping[str, set[str]]


class Tree:
    """The parsed modules of a checkout, by dotted name.

    Args:
      folders: packages by the folders that hold them.
    """

    def __init__(self, root: Path, folders: Mapping[str, str] = FOLDERS) -> None:
        self.root, self.files, self.parsed = root, {}, {}
        for folder, package in folders.items():
            for file in sorted((root / folder).rglob("*.py")):
                inner = file.relative_to(root / folder).with_suffix("").parts
                name = ".".join([package, *(part for part in inner if part != "__init__")])
                self.files[name], self.parsed[name] = file, ast.parse(file.read_text(encoding="utf-8"))

    def imports(self) -> dict[str, set[str]]:
        """Modules of the tree that each module imports, inside functions and for type checking too."""
        return {
            module: {found for name in imported(parsed) if (found := self.module_of(name)) and found != module}
            for module, parsed in self.parsed.items()
        }

    def module_of(self, name: str) -> str:
        """The module that a dotted name is or belongs to; empty if it is none of the tree."""
        while name and name not in self.files:
            name = name.rpartition(".")[0]
        return name

    def functions(self) -> Iterator[int]:
        """Lines of every function definition."""
        for parsed in self.parsed.values():
            for node in ast.walk(parsed):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    yield node.end_lineno - node.lineno + 1

    def classes(self) -> dict[str, set[str]]:
        """Modules that define a class, by its name."""
        places: dict[str, set[str]] = {}
        for module, parsed in self.parsed.items():
            for node in ast.walk(parsed):
                if isinstance(node, ast.ClassDef):
                    places.setdefault(node.name, set()).add(module)
        return places

    def tuning_constants(self) -> int:
        """Numbers in module-level assignments of the planner, but for the limits."""
        return sum(
            isinstance(leaf, ast.Constant) and type(leaf.value) in (int, float)
            for module, parsed in self.parsed.items()
            if module.startswith("meshdsl.planner.") and module != "meshdsl.planner.limits"
            for node in parsed.body
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None
            for leaf in ast.walk(node.value)
        )


def imported(parsed: ast.Module) -> Iterator[str]:
    """Dotted names that a module imports."""
    for node in ast.walk(parsed):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def components(edges: Edges) -> list[set[str]]:
    """Strongly connected components (Kosaraju 1978)."""
    order: list[str] = []
    seen: set[str] = set()
    for start in edges:
        stack = [(start, iter(edges[start]))] if start not in seen else []
        seen.add(start)
        while stack:
            node, targets = stack[-1]
            following = next((target for target in targets if target not in seen), None)
            if following is None:
                order.append(stack.pop()[0])
            else:
                seen.add(following)
                stack.append((following, iter(edges[following])))
    reverse: dict[str, set[str]] = {node: set() for node in edges}
    for node, targets in edges.items():
        for target in targets:
            reverse[target].add(node)
    found, placed = [], set()
    for start in reversed(order):
        component, todo = set(), [start]
        while todo:
            node = todo.pop()
            if node not in placed:
                placed.add(node)
                component.add(node)
                todo += reverse[node]
        if component:
            found.append(component)
    return found


def floors(imports: Edges) -> int:
    """The longest chain of packages that import each other downwards."""

    def package(module: str) -> str:
        return module.split(".")[1] if "." in module else module

    edges: dict[str, set[str]] = {package(module): set() for module in imports}
    for module, targets in imports.items():
        edges[package(module)] |= {package(target) for target in targets} - {package(module)}
    home = {name: min(component) for component in components(edges) for name in component}
    merged: dict[str, set[str]] = {home[name]: set() for name in edges}
    for name, targets in edges.items():
        merged[home[name]] |= {home[target] for target in targets} - {home[name]}
    heights: dict[str, int] = {}
    for name in TopologicalSorter(merged).static_order():
        heights[name] = 1 + max((heights[target] for target in merged[name]), default=0)
    return max(heights.values())


def figures(root: Path) -> dict[str, str]:
    """The figures of a checkout, by name."""
    tree = Tree(root)
    imports, functions = tree.imports(), list(tree.functions())
    lines = {file: len(file.read_text(encoding="utf-8").splitlines()) for file in tree.files.values()}
    largest = max(lines, key=lines.__getitem__)
    small = sum(length <= SMALL for length in functions)
    return {
        "files": f"{len(lines)}",
        "lines": f"{sum(lines.values()):,}",
        "median file, lines": f"{median(lines.values()):.0f}",
        "largest file, lines": f"{lines[largest]} (`{largest.relative_to(root)}`)",
        "modules loose in `meshdsl/`": f"{len(list((root / 'meshdsl').glob('*.py')))}",
        "floors": f"{floors(imports)}",
        "import cycles between files": f"{sum(len(component) > 1 for component in components(imports))}",
        "functions": f"{len(functions):,}",
        "functions of at most four lines": f"{small:,} ({small / len(functions):.0%})",
        "tuning constants of the planner outside `SearchLimits`": f"{tree.tuning_constants()}",
        "class names of two meanings": f"{sum(len(places) > 1 for places in tree.classes().values())}",
    }


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", nargs="*", type=Path, default=[ROOT])
    columns = [figures(root.resolve()) for root in parser.parse_args().checkouts]
    header = ("figure", *(f"checkout {i}" for i in range(1, len(columns) + 1)))
    print(table(header, [(name, *(column[name] for column in columns)) for name in columns[0]]))


if __name__ == "__main__":
    main()
