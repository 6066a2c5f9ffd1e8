"""Import code by name only if the user named it.

A recipe, a run folder or a record can come from a stranger, and `package.module:function` in it would run the stranger's code.
So a name is imported only if the command line gave it, with --trust, or if the module is part of optg. The decision is kept in
an environment variable, so that child processes decide alike.

`python -m optg` imports this module before any other, while a stranger's files can still hide the standard library: it may
import nothing but os and sys, which are loaded already.
"""

import os
import sys

VARIABLE = "OPTG_TRUST"  # the names that the user gave, one per line
EVERYTHING = "*"  # stands for all names
PACKAGES = ("timm", "torchvision", "synthetic")  # sources of models and data that are not modules of the user
FOUND_IN: dict[str, str] = {}  # the file that each name was read from, for error messages


class UntrustedCode(ValueError):
    """A file names code that the user did not name."""


def allow(name: str | None) -> None:
    """Allow `package.module:function` to be imported, also from the working directory. Other names need no permission."""
    source, colon, _ = (name or "").partition(":")
    if name == EVERYTHING or (name and colon and source not in PACKAGES and "\n" not in name):
        os.environ[VARIABLE] = "\n".join(dict.fromkeys([*allowed(), name]))
        use_working_directory()


def allow_everything() -> None:
    """Allow all names: --trust."""
    allow(EVERYTHING)


def allowed() -> list[str]:
    """Return the names that the user gave."""
    return os.environ.get(VARIABLE, "").splitlines()


def refuse_untrusted(name: str) -> None:
    """Raise unless the user named this code, or it is part of optg."""
    module = name.partition(":")[0]
    if module.split(".")[0] == "optg" or not {name, EVERYTHING}.isdisjoint(allowed()):
        return
    file = FOUND_IN.get(name, "a file")
    raise UntrustedCode(
        f"{file} names {name!r}; this would import the module {module!r} and run its code. If you trust the file's origin, "
        "add --trust (in Python: optg.trust.allow)"
    )


def refuse_borrowed(name: str, function: object) -> None:
    """Raise if a name inside optg leads to a function that optg only imports, such as one of the standard library."""
    home = str(getattr(function, "__module__", ""))
    if name.startswith("optg.") and not home.startswith("optg.") and {name, EVERYTHING}.isdisjoint(allowed()):
        raise UntrustedCode(
            f"{name!r} is not a function of optg but of {home!r}; if you trust the file that names it, add --trust"
        )


def trusts_everything() -> bool:
    return EVERYTHING in allowed()


def python() -> list[str]:
    """Return the command that starts Python for a child process: without its working directory on sys.path, if possible.

    If `python -m` started this process, optg itself may come from there.
    """
    by_name = getattr(sys.modules["__main__"], "__spec__", None) is not None and not sys.flags.safe_path
    return [sys.executable] if by_name else [sys.executable, "-P"]


def leave_working_directory() -> None:
    """Take the working directory off `sys.path`, where `python -m` or an empty entry of PYTHONPATH has put it.

    It stays if PYTHONPATH names it, or if optg or the standard library is in it.
    """
    try:
        here = os.path.realpath(os.getcwd())
    except OSError:  # it was deleted
        return
    named = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    kept = [*named, os.path.dirname(os.path.dirname(__file__)), os.path.dirname(os.__file__)]
    if here not in map(os.path.realpath, kept):
        sys.path[:] = [path for path in sys.path if path and os.path.realpath(path) != here]
    if allowed():
        use_working_directory()


def use_working_directory() -> None:
    """Let users import their own modules. The working directory comes last, so that no file there hides a package."""
    try:
        here = os.getcwd()
    except OSError:  # it was deleted
        return
    if here not in sys.path:
        sys.path.append(here)
