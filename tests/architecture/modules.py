"""Read the source of the package: its files, and what each of them imports."""

import ast
from collections.abc import Iterator
from pathlib import Path

import optg

ROOT = Path(optg.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))


def module_name(file: Path) -> str:
    """Return the dotted name of a file of the package."""
    parts = file.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def area(module: str) -> str:
    """Return the part of optg that a module belongs to: "core" for optg.core.masks; "" for optg itself."""
    return [*module.split("."), ""][1]


def imports(file: Path) -> Iterator[tuple[int, str]]:
    """Yield the line and full name of everything a file imports, inside functions and `if TYPE_CHECKING` too.

    `from a import b` yields a.b; after `import optg`, the expression optg.b counts as an import of optg.b.
    """
    package = module_name(file).split(".")
    if file.name != "__init__.py":
        package.pop()
    tree = ast.parse(file.read_text())
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from ((node.lineno, alias.name) for alias in names)
            case ast.ImportFrom(module=module, names=names, level=level):
                base = package[: len(package) - level + 1] if level else []
                start = ".".join([*base, *([module] if module else [])])
                yield from ((node.lineno, f"{start}.{alias.name}") for alias in names)
            case ast.Call(
                func=ast.Name("import_module") | ast.Attribute(attr="import_module"), args=[ast.Constant(str() as name)]
            ):
                yield node.lineno, name
            case ast.Attribute(value=ast.Name("optg"), attr=name):
                yield node.lineno, f"optg.{name}"
