"""Decide which errors are shown as one line, and which with a traceback."""

import sysconfig
import traceback
from pathlib import Path

import optg
from optg.training.errors import DamagedFile, TrainingError

CLI_PACKAGES = {"rich": "rich", "tyro": "tyro", "PIL": "pillow", "matplotlib": "matplotlib"}  # import name: package
TRUSTED = (  # where code is not the user's own
    str(Path(optg.__file__).parent),
    *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    "<",  # "<string>", "<frozen importlib>"
)


def explains_itself(error: BaseException) -> bool:
    """Return whether the message is enough: errors of input values and files, unless raised in a user's own model or data."""
    if isinstance(error, TrainingError):
        return True
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    return isinstance(error, (ValueError, OSError)) and all(file.startswith(TRUSTED) for file in files)


def advice(error: BaseException) -> str:
    """Return what to do about an error that only says what is wrong."""
    return "; optg verify RUN says what can be recovered" if isinstance(error, DamagedFile) else ""


def missing_package(error: BaseException) -> str | None:
    """Return the package of the `cli` extra whose absence caused an error."""
    missing = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    return CLI_PACKAGES.get(missing)


def is_interrupt(error: BaseException | None) -> bool:
    """Return whether Ctrl-C caused an error. Python wraps a KeyboardInterrupt that arrives during an import."""
    return error is not None and (isinstance(error, KeyboardInterrupt) or is_interrupt(error.__cause__))
