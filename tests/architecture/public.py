"""List the public names, signatures, options and flags: python -m tests.architecture.public > tests/architecture/public.txt"""

import dataclasses
import inspect
import io
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from typing import Any
from unittest import mock

import optg
from optg.cli import COMMANDS, main
from optg.methods import METHODS

WIDE = {"COLUMNS": "129"}  # tyro prints long help texts in two columns on anything wider


def signature(function: Callable[..., Any]) -> str:
    """Return a function's parameters and defaults, without annotations."""
    found = inspect.signature(function)
    plain = [p.replace(annotation=inspect.Parameter.empty) for p in found.parameters.values()]
    return str(inspect.Signature(plain))


def functions() -> Iterator[str]:
    for name in sorted(optg.__all__):
        value = getattr(optg, name)
        yield f"optg.{name}" + (signature(value) if inspect.isfunction(value) else "")


def members(cls: type) -> Iterator[str]:
    """Yield the public methods and properties that a class and its parents define."""
    yield f"{cls.__name__}{signature(cls)}"
    for name, value in sorted(inspect.getmembers(cls)):
        if not name.startswith("_"):
            yield f"{cls.__name__}.{name}" + (signature(value) if callable(value) else "")


def methods() -> Iterator[str]:
    for name, method in METHODS.items():
        fields = [f"{field.name}={field.default!r}" for field in dataclasses.fields(method)]
        yield f"{name}: {method.__name__}({', '.join(fields)})"


def show_help(*args: str) -> str:
    """Return what `optg … --help` prints. It has no boxes, because the output has no encoding."""
    printed = io.StringIO()
    argv, environment = mock.patch.object(sys, "argv", ["optg", *args, "--help"]), mock.patch.dict("os.environ", WIDE)
    with argv, environment, redirect_stdout(printed):
        try:
            main()
        except SystemExit as stopped:
            assert not stopped.code, printed.getvalue()
    return printed.getvalue()


def arguments(text: str) -> Iterator[str]:
    """Yield the positional arguments in a help text, then its flags in alphabetical order, each with its default.

    An argument starts in the third column; its help follows on the same line or further right on the next ones. The
    description of a group of flags starts there too, but has a line of dashes below it.
    """
    entries: list[str] = []
    helps: list[str] = []
    for line in text.splitlines():
        if line.startswith("  ---"):
            entries.pop()
            helps.pop()
        elif new := re.match(r"  (\S.*?)(?:  |$)", line):
            entries.append(new[1])
            helps.append(line)
        elif helps and line.startswith("    "):
            helps[-1] = f"{helps[-1].rstrip()} {line.strip()}"
    for i, text in enumerate(helps):
        if default := re.search(r"\(default: [^()]*(\([^()]*\))?[^()]*\)(?= *$)", text):
            entries[i] += f" {default[0]}"
    yield from (entry for entry in entries if not entry.startswith("-"))
    yield from sorted(entry for entry in entries if entry.startswith("--"))


def commands() -> Iterator[str]:
    for command in COMMANDS:
        yield f"optg {command}"
        yield from (f"    {argument}" for argument in arguments(show_help(command)))


def public() -> str:
    """Return the whole list as text."""
    sections = {
        "Functions": functions(),
        "Sparsifier": members(optg.Sparsifier),
        "Methods and their options": methods(),
        "Commands and their arguments": commands(),
    }
    return "\n".join(f"# {title}\n" + "\n".join(lines) + "\n" for title, lines in sections.items())


if __name__ == "__main__":
    print(public(), end="")
