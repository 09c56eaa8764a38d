"""Writes the pages of the API reference from the sources: signature and docstring of every public name.

The public names and their groups are those of ``meshdsl/__init__.pyi``. Sources are parsed and not imported, so the
site is built without jax.
"""

import ast
import re
from dataclasses import dataclass
from pathlib import Path

GROUPS = re.compile(r"^# ---- (.*)$", re.MULTILINE)
FIELDS = ("Args", "Returns", "Raises", "Yields", "Example", "Source")
MOVED = ("layouts", "lowering", "models")  # packages whose sources lie beside meshdsl/
TABLED = "The function of this name in `jax.numpy`, `jax.nn` or `jax.lax`, on tensors with named dims."
INTRODUCTION = "Signatures and docstrings of the public names, as the sources have them."


@dataclass(frozen=True)
class Name:
    """A public name, and the module that defines it."""

    public: str
    module: str


def write_api_pages(root: Path, folder: Path) -> None:
    """Writes one page per group of names, and an index of them, to ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    stub = (root / "meshdsl" / "__init__.pyi").read_text(encoding="utf-8")
    titles = GROUPS.findall(stub)
    parts = GROUPS.split(stub)[2::2]
    pages = []
    for title, part in zip(titles, parts, strict=True):
        names = names_of(part)
        if any(name.public == "*" for name in names):  # tensors with named dims have groups of their own
            nested = (root / "meshdsl" / "nd" / "__init__.pyi").read_text(encoding="utf-8")
            names = names_of(nested)
        title = title.partition(":")[0].replace("``", "`")
        page = re.sub(r"\W+", "-", title.lower()).strip("-")
        sections = "\n\n".join(section(root, name) for name in names)
        (folder / f"{page}.md").write_text(f"# {title}\n\n{sections}\n", encoding="utf-8")
        pages.append((page, title, names))
    rows = [f"| [{title}]({page}.md) | {', '.join(f'`{n.public}`' for n in names)} |" for page, title, names in pages]
    table = "\n".join(["| group | names |", "| --- | --- |", *rows])
    tree = "\n".join(["```{toctree}", ":hidden:", *(page for page, _, _ in pages), "```"])
    (folder / "index.md").write_text(f"# API\n\n{INTRODUCTION}\n\n{table}\n\n{tree}\n", encoding="utf-8")


def names_of(stub: str) -> list[Name]:
    """Returns the names that a stub imports, in its order."""
    imports = [node for node in ast.parse(stub).body if isinstance(node, ast.ImportFrom)]
    found = [Name(alias.name, node.module or "") for node in imports for alias in node.names]
    return [name for name in found if name.public[0] != "_" and name.module != "meshdsl"]


def section(root: Path, name: Name) -> str:
    """Returns the section of a public name: signature, docstring, and its public methods."""
    found, home = definition(root, name)
    text = [f"## `md.{name.public}`"]
    if isinstance(found, ast.ClassDef):
        text += [code(signature(found)), markdown(found)]
        text += [members(root, home, found, name.public)]
    elif isinstance(found, ast.FunctionDef):
        text += [code(signature(found)), markdown(found)]
    elif isinstance(found, ast.Assign) and isinstance(found.targets[0], ast.Tuple):
        text += [TABLED]
    else:
        text += [code(ast.unparse(found))]
    return "\n\n".join(part for part in text if part)


def members(root: Path, module: str, node: ast.ClassDef, public: str) -> str:
    """Returns the sections of a class's public methods and properties; then fields and methods of its bases of ours."""
    text = []
    for method in node.body:
        if isinstance(method, ast.FunctionDef) and method.name[0] != "_" and ast.get_docstring(method):
            text += [f"### `{public}.{method.name}`", code(signature(method)), markdown(method)]
    for base in map(ast.unparse, node.bases):
        try:
            found, home = definition(root, Name(base, module))
        except LookupError:  # a base of Python or jax
            continue
        if isinstance(found, ast.ClassDef) and len(found.body) > 1:  # more than a docstring
            text += [f"### Fields of `{public}`", code(signature(found)), markdown(found)]
            text += [members(root, home, found, public)]
    return "\n\n".join(part for part in text if part)


def definition(root: Path, name: Name) -> tuple[ast.stmt, str]:
    """Returns the definition of a name and its module: the given one, or where that imports the name from."""
    tree = ast.parse(file_of(root, name.module).read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name.public:
            return node, name.module
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        named = [each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)]
        if name.public in named:
            return node, name.module
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                if (alias.asname or alias.name) == name.public and node.module.startswith("meshdsl"):
                    return definition(root, Name(alias.name, node.module))
    raise LookupError(f"{name.public} is not defined in {name.module}")


def file_of(root: Path, module: str) -> Path:
    """Returns the source file of a module of meshdsl."""
    parts = module.split(".")
    path = root.joinpath(*(parts[1:] if parts[1:2] and parts[1] in MOVED else parts))
    return next(
        file for file in (path.with_suffix(".py"), path / "__init__.pyi", path / "__init__.py") if file.exists()
    )


def signature(node: ast.ClassDef | ast.FunctionDef) -> str:
    """Returns a definition without its body; of a dataclass, its fields."""
    if isinstance(node, ast.ClassDef):
        bases = f"({', '.join(map(ast.unparse, node.bases))})" if node.bases else ""
        fields = [each for each in node.body if isinstance(each, ast.AnnAssign) and ast.unparse(each.target)[0] != "_"]
        return "\n".join([f"class {node.name}{bases}", *(f"    {ast.unparse(each)}" for each in fields)])
    properties = [d for d in map(ast.unparse, node.decorator_list) if d in ("property", "cached_property")]
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    listed = re.sub(r"^(self|cls)(, |$)", "", ast.unparse(node.args))
    whole = f"{node.name}({listed}){returns}"
    if properties:
        return f"{node.name}: {ast.unparse(node.returns)}" if node.returns else node.name
    if len(whole) <= 100:
        return whole
    arguments = wrapped(listed)
    return "\n".join([f"{node.name}(", *(f"    {each}," for each in arguments), f"){returns}"])


def wrapped(arguments: str) -> list[str]:
    """Returns the arguments of a signature, split at commas outside of brackets."""
    parts, depth, quote = [""], 0, ""
    for sign in arguments:
        if sign in "\"'":
            quote = "" if quote == sign else quote or sign
        depth += 0 if quote else (sign in "([{") - (sign in ")]}")
        if sign == "," and not depth and not quote:
            parts.append("")
        else:
            parts[-1] += sign
    return [part.strip() for part in parts]


def code(text: str) -> str:
    """Returns a block of Python."""
    return f"```python\n{text}\n```"


def markdown(node: ast.ClassDef | ast.FunctionDef) -> str:
    """Returns a Google-style docstring as Markdown: fields as lists, examples and indented text as blocks."""
    lines = (ast.get_docstring(node) or "").split("\n")
    out: list[str] = []
    i = 0
    while i < len(lines):
        line = lines[i]
        field = re.fullmatch(rf"({'|'.join(FIELDS)}):", line)
        if field or line.startswith("    "):
            start = i + 1 if field else i
            end = start
            while end < len(lines) and (not lines[end].strip() or lines[end].startswith(" ")):
                end += 1
            body = "\n".join(lines[start:end]).strip("\n")
            if field and field[1] != "Example":
                out += [f"**{field[1]}**", "", bullets(body), ""]
            else:
                language = "pycon" if body.lstrip().startswith(">>>") else "text"
                out += [*(["**Example**", ""] if field else []), f"```{language}\n{dedented(body)}\n```", ""]
            i = end
        else:
            out.append(prose(line))
            i += 1
    return "\n".join(out).strip()


def dedented(text: str) -> str:
    """Returns an example without its indent."""
    lines = text.split("\n")
    indent = min((len(line) - len(line.lstrip()) for line in lines if line.strip()), default=0)
    return "\n".join(line[indent:] for line in lines)


def bullets(body: str) -> str:
    """Returns ``name: text`` rows of a field as a list, and other text as it is."""
    rows = dedented(body).split("\n")
    if not any(re.match(r"[*\w`, ]+: ", row) for row in rows if row[:1] != " "):
        return prose(" ".join(row.strip() for row in rows))
    out: list[str] = []
    for row in rows:
        named = re.match(r"([*\w`, ]+): (.*)", row)
        if named and row[0] != " ":
            out.append(f"- `{named[1].replace('`', '')}`: {prose(named[2])}")
        elif row.strip():
            out.append(f"  {prose(row.strip())}")
    return "\n".join(out)


def prose(text: str) -> str:
    """Returns text of a docstring as Markdown: code and references in backquotes, nothing else marked up."""
    text = re.sub(r":\w+:`~?([^`]*)`", r"``\1``", text)
    parts = re.split(r"(``.*?``|`[^`]*`)", text)
    plain = [re.sub(r"([*_\[\]<>])", r"\\\1", part) if k % 2 == 0 else part for k, part in enumerate(parts)]
    return "".join(plain)
