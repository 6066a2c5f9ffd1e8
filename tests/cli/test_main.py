"""`optg` itself: its help, the choice of a command, and how errors are shown."""

import subprocess
import sys

import pytest

import optg as package
from optg import cli
from tests.cli.calling import call, optg, refusal
from tests.training.runs import ENVIRONMENT

IMPORTED_BY_MAIN = """
import sys
from optg import cli
sys.argv = ["optg", *sys.argv[1:]]
try:
    cli.main()
except SystemExit:
    pass
print("IMPORTED", *(name for name in ("torch", "rich", "PIL", "matplotlib", "tyro") if name in sys.modules))
"""


def imported_by(*args: str) -> set[str]:
    """Return which heavy packages a command imports."""
    done = subprocess.run([sys.executable, "-c", IMPORTED_BY_MAIN, *args], capture_output=True, text=True)
    marker, *names = done.stdout.splitlines()[-1].split()
    assert marker == "IMPORTED", done.stderr
    return set(names)


@pytest.mark.parametrize("command", [None, *sorted(set(cli.COMMANDS) - {"train"})])
def test_help_does_not_import_torch(command):
    imported = imported_by(*filter(None, [command]), "--help")
    assert not imported & {"torch", "PIL", "matplotlib"}


def test_a_wrong_flag_is_refused_without_importing_torch():
    assert "torch" not in imported_by("bench", "vgg19", "--secnods", "3")


def test_opening_runs_and_recipes_from_python_needs_no_package_of_the_command_line():
    code = "import sys, optg.training.recipe, optg.training.saved; sys.exit(bool({'tyro', 'rich'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize("args", [("--help",), ("-h",)])
def test_help_lists_every_command_with_a_line(args, monkeypatch, capsys):
    with pytest.raises(SystemExit, match="0"):
        call(monkeypatch, *args)
    lines = capsys.readouterr().out.splitlines()
    for command in cli.COMMANDS:
        [line] = [line for line in lines if line.startswith(f"  {command} ")]
        assert len(line) > 30 and line.endswith(".")


def test_no_command_shows_the_help(monkeypatch, capsys):
    with pytest.raises(SystemExit, match="2"):
        call(monkeypatch)
    assert "commands:" in capsys.readouterr().out


def test_the_version(monkeypatch, capsys):
    call(monkeypatch, "--version")
    assert capsys.readouterr().out == f"optg {package.__version__}\n"


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_command_explains_itself(command, monkeypatch, capsys):
    with pytest.raises(SystemExit, match="0"):
        call(monkeypatch, command, "--help")
    assert f"usage: optg {command} " in capsys.readouterr().out


def test_an_unknown_command_is_refused():
    wrong = optg("method")
    assert wrong.returncode == 2 and "Traceback" not in wrong.stderr
    assert "unknown command 'method'; did you mean 'methods'? Known: train, verify, evaluate," in wrong.stderr


def test_an_unknown_command_without_a_similar_one_is_refused(monkeypatch, capsys):
    assert "unknown command 'nonsense'; known: train," in refusal(monkeypatch, capsys, "nonsense")


def test_an_error_in_a_users_own_code_shows_where(tmp_path):
    (tmp_path / "mine.py").write_text("def data(folder):\n    x, y, z = [1, 2]\n")
    command = [sys.executable, "-m", "optg", "train", "--data", "mine:data", "--output", str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, cwd=tmp_path)
    assert done.returncode == 1 and "mine.py" in done.stderr and "line 2" in done.stderr


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ImportError()])
def test_ctrl_c_exits_with_130(error, monkeypatch, capsys):
    error.__cause__ = KeyboardInterrupt() if isinstance(error, ImportError) else None

    def interrupted(args):
        raise error

    monkeypatch.setattr(cli, "run_command", interrupted)
    with pytest.raises(SystemExit, match="130"):
        call(monkeypatch, "methods")
    assert capsys.readouterr().err == "Interrupted.\n"


def test_a_closed_output_pipe_exits_quietly():
    command = f"{sys.executable} -m optg methods --markdown | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert done.returncode in (0, 141) and not done.stderr  # 0: the pipe was closed after the last write
