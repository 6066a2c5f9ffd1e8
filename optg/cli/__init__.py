"""The command line: `optg COMMAND …`. Each command is a module of this folder, imported only when it is called.

A command module has a function `main(args)`, whose docstring is the command's line in `optg --help`. It imports torch only
after it has parsed its arguments, so that help and errors appear at once. `train` must import it before: its flags are the
fields of the method's class.
"""

import os
import sys
import warnings
from importlib import import_module

import optg
from optg import trust
from optg.cli.errors import advice, explains_itself, is_interrupt, missing_package
from optg.naming import nearest, visible

COMMANDS = (
    "train",
    "verify",
    "evaluate",
    "summary",
    "methods",
    "recipes",
    "export",
    "predict",
    "bench",
    "report",
    "reproduce",
    "paradox",
)
RENAMED = {"run": "predict"}


def main() -> None:
    """Run the command that `sys.argv` names."""
    warnings.formatwarning = lambda message, category, *_: (
        f"{category.__name__}: {visible(message)}\n"
    )  # without the line of code
    trust.leave_working_directory()  # it comes back when the command line names a user's own model or dataset
    try:
        run_command(sys.argv[1:])
    except BrokenPipeError:  # for example `optg … | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
    except (Exception, KeyboardInterrupt) as error:
        if is_interrupt(error):
            print("Interrupted.", file=sys.stderr)
            sys.exit(130)
        if package := missing_package(error):
            print(f"optg: {package} is not installed; the command line needs it: pip install 'optg[cli]'", file=sys.stderr)
            sys.exit(2)
        if not explains_itself(error):
            raise
        print(f"optg: {visible(error)}{advice(error)}", file=sys.stderr)
        sys.exit(2)


def run_command(args: list[str]) -> None:
    if not args or args[0] in ("-h", "--help"):
        print(help_text())
        sys.exit(0 if args else 2)
    command = args[0]
    if command == "--version":
        print(f"optg {optg.__version__}")
        return
    if command in RENAMED:
        command = RENAMED[command]
        print(f"optg: `optg {args[0]}` is now called `optg {command}`", file=sys.stderr)
    if command not in COMMANDS:
        raise ValueError(f"unknown command {command!r}; {nearest(command, COMMANDS)}")
    import_module(f"optg.cli.{command}").main(args[1:])


def help_text() -> str:
    """Return the text of `optg --help`."""
    lines = [f"  {name:10} {import_module(f'optg.cli.{name}').main.__doc__}" for name in COMMANDS]
    return "\n".join(
        [
            "usage: optg COMMAND …",
            "",
            "Make neural networks sparse while they train.",
            "",
            "commands:",
            *lines,
            "",
            "To see the options of a command: optg COMMAND --help",
            "To see the version: optg --version",
        ]
    )
