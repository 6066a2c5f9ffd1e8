"""Only code that the user names is imported: on the command line, with --trust, or as a part of optg."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import optg
from optg import trust
from optg.data import load
from optg.experiments import ray_launcher
from optg.models import MODELS, build
from optg.training.recipe import Plan, Recipe, dump
from optg.training.recipe import load as load_recipe
from tests.cli.calling import call
from tests.training.runs import ROOT

EVIL = """
from pathlib import Path

import torch
from torch import nn

Path(__file__).with_name("executed").touch()


def build(classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, classes))


def data(folder):
    images, labels = torch.randn(32, 1, 8, 8), torch.arange(32) % 10
    return (images, labels), (images, labels)
"""


@pytest.fixture(autouse=True)
def clean(tmp_path, monkeypatch) -> None:
    """Work in a folder with a module that leaves a trace when it is imported. Undo what a test allows."""
    monkeypatch.setenv(trust.VARIABLE, "")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "evil", raising=False)
    (tmp_path / "evil.py").write_text(EVIL)


def executed() -> bool:
    return Path("executed").exists()


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command in the test's folder, where optg is found by PYTHONPATH."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run(command, capture_output=True, text=True, env=env)


def optg_command(*args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return run(sys.executable, "-m", "optg", *args, **environment)


@pytest.fixture
def optg_here(monkeypatch, capsys) -> Callable[..., tuple[int, str]]:
    """A function that runs a command in this process, trusting nobody yet. It returns the exit status and the errors."""

    def run(*args: str) -> tuple[int, str]:
        monkeypatch.setenv(trust.VARIABLE, "")
        monkeypatch.delitem(sys.modules, "evil", raising=False)
        capsys.readouterr()
        try:
            call(monkeypatch, *args)
        except SystemExit as exit:
            return int(exit.code or 0), capsys.readouterr().err
        return 0, capsys.readouterr().err

    return run


@pytest.fixture
def stranger(optg_here) -> Path:
    """The folder of a run whose model and data come from evil.py, as a stranger made it. No trace of the import is left."""
    settings = ("--epochs", "2", "--batch-size", "16", "--device", "cpu", "--output", "stranger")
    assert optg_here("train", "--model", "evil:build", "--data", "evil:data", *settings) == (0, "") and executed()
    Path("executed").unlink()
    return Path("stranger")


OPENING = {
    "evaluate": ("evaluate", "stranger", "--device", "cpu"),
    "summary": ("summary", "stranger"),
    "export": ("export", "stranger"),
    "predict": ("predict", "stranger", "--data", "test"),
    "bench": ("bench", "stranger", "--batches", "1", "--threads", "1", "--seconds", "0.01", "--engines", "torch"),
    "paradox": (
        "paradox",
        "stranger",
        "--steps",
        "0",
        "--batches",
        "1",
        "--counts",
        "5",
        "--criteria",
        "snip",
        "--batch-size",
        "16",
    ),
    "recipe file": ("train", "--recipe", "stranger/recipe.toml", "--device", "cpu", "--output", "again"),
    "start": (
        "train",
        "--model",
        "optg.experiments.trained:stranger",
        "--epochs",
        "2",
        "--device",
        "cpu",
        "--output",
        "again",
    ),
}


@pytest.mark.parametrize("command", OPENING.values(), ids=OPENING)
def test_a_strangers_run_executes_nothing_without_the_users_word(stranger, optg_here, command):
    status, message = optg_here(*command)
    assert status == 2 and not executed()
    [line] = message.splitlines()
    assert re.match(r"optg: stranger/recipe\.toml names 'evil:(build|data)'; this would import the module 'evil'", line)
    assert "--trust" in line
    status, message = optg_here(*command, "--trust")
    assert status == 0 and executed(), message


def test_a_report_executes_nothing(stranger, optg_here):
    assert optg_here("report", "stranger")[0] == 0 and not executed()


def test_names_on_the_command_line_are_the_users_word(stranger, optg_here):
    named = ("--model", "evil:build", "--data", "evil:data")
    again = ("train", "--recipe", "stranger/recipe.toml", "--device", "cpu", "--output", "again")
    for words in (named[:2], named[2:]):  # the other one is only in the recipe
        assert "stranger/recipe.toml names 'evil:" in optg_here(*again, *words)[1]
    assert optg_here(*again, *named)[0] == 0
    assert optg_here("train", "--model=evil:build", "--data=evil:data", *again[1:])[0] == 0


def test_a_folder_that_is_called_like_code_is_not_a_word(stranger, optg_here):
    stranger.rename("evil:build")
    for name in ("evaluate", "summary", "bench", "paradox"):
        status, message = optg_here(*("evil:build" if word == "stranger" else word for word in OPENING[name]))
        assert status == 2 and "--trust" in message and not executed()


def test_children_inherit_the_decision():
    """A run of `reproduce` that starts from another run finds the model's name only in that run's recipe."""
    command = (
        "reproduce",
        "supermasks",
        "--only",
        "trained weights",
        "--columns",
        "90",
        "--set",
        "batch_size=16",
        "--epochs",
        "2",
    )
    done = optg_command(*command, "--model", "evil:build", "--data", "evil:data", "--device", "cpu", "--seeds", "0")
    assert done.returncode == 0 and "2/2" in done.stdout, done.stdout + done.stderr


def test_nodes_of_a_ray_cluster_get_the_decision():
    show = [sys.executable, "-c", "from optg import trust; print(trust.allowed())"]
    assert ray_launcher.run_command(show, Path.cwd(), Path("log"), Path("stop"), ["evil:build", "evil:data"]) == 0
    assert Path("log").read_text().strip() == "['evil:build', 'evil:data']"


@pytest.mark.parametrize("name", ["evil:build", "evil:nothing", "os:system", "optgevil:build", "evil.optg:build"])
def test_names_in_python_need_a_word(name):
    with pytest.raises(trust.UntrustedCode, match=r"--trust \(in Python: optg\.trust\.allow\)"):
        build(name, 4)
    with pytest.raises(trust.UntrustedCode):
        load(name, batch_size=16, device="cpu", seed=0)
    assert not executed()
    trust.allow("evil:build")
    assert isinstance(build("evil:build", 4), torch.nn.Module)
    with pytest.raises(trust.UntrustedCode):
        build("evil:data", 4)  # another function of the same module


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("optg.models:build", {"name": "evil:build"}),
        ("optg.models:from_function", {"module": "evil", "function": "build", "options": {}}),
        ("optg.models:import_or_advise", {"module": "evil", "advice": ""}),
    ],
)
def test_no_name_inside_optg_leads_to_other_code(name, options):
    with pytest.raises(ValueError):
        build(name, 4, options)
    assert not executed()


def test_functions_that_optg_only_imports_are_not_its_own():
    with pytest.raises(trust.UntrustedCode, match="is not a function of optg but of 'functools'"):
        build("optg.models:partial", 4)
    with pytest.raises(trust.UntrustedCode, match="is not a function of optg but of 'importlib'"):
        load("optg.data.own:import_module", batch_size=16, device="cpu", seed=0)
    assert build("optg.models.digits:digits", 4)(torch.zeros(1, 1, 8, 8)).shape == (1, 4)


def test_importing_main_does_not_start_the_command_again(optg_here):
    status, message = optg_here("summary", "optg.__main__:main")
    assert status == 2 and "optg.__main__:main cannot be called" in message


class Pickled:
    def __reduce__(self):
        return Path.touch, (Path("executed"),)


def test_a_checkpoint_that_an_option_names_executes_nothing(monkeypatch):
    """`model_options` of a recipe reach timm's functions, some of which unpickle a file with `weights_only=False`."""
    torch.save(Pickled(), "weights.pth")
    monkeypatch.setitem(MODELS, "timm", lambda classes, checkpoint_path: torch.load(checkpoint_path, weights_only=False))
    with pytest.raises(ValueError, match="Weights only load failed"):
        build("timm", 10, {"checkpoint_path": "weights.pth"})
    assert not executed() and "TORCH_FORCE_WEIGHTS_ONLY_LOAD" not in os.environ
    trust.allow_everything()
    build("timm", 10, {"checkpoint_path": "weights.pth"})
    assert executed()


def test_a_run_that_starts_from_itself_is_refused(optg_here):
    folder = Path("loop")
    folder.mkdir()
    (folder / "recipe.toml").write_text(dump(Plan(Recipe(model="optg.experiments.trained:loop"))))
    (folder / "summary.json").write_text('{"classes": 10, "shape": [1, 8, 8]}')
    save_file({"weight": torch.zeros(1)}, folder / "model.safetensors")
    message = "optg: the run loop starts from its own model; expected a recipe that names another one\n"
    assert optg_here("summary", "loop") == (2, message)


def test_the_error_names_the_file():
    Path("mine.toml").write_text('model = "evil:build"\n')
    plan = load_recipe("mine.toml")
    with pytest.raises(trust.UntrustedCode, match=r"^mine\.toml names 'evil:build'"):
        build(plan.recipe.model, 4)


# ---- the working directory


def test_no_file_of_the_working_directory_is_imported():
    """`python -m` puts the working directory first; an empty entry of PYTHONPATH puts it before the standard library."""
    for module in ("rich", "tyro", "torch", "traceback", "typing", "difflib", "sysconfig", "dataclasses"):
        Path(f"{module}.py").write_text("from pathlib import Path\nPath('executed').touch()\n")
    script = "from optg.__main__ import main; main()"  # what the installed command does
    for command, paths in (("-m", "optg"), str(ROOT)), (("-P", "-c", script), f"{ROOT}{os.pathsep}"):
        done = run(sys.executable, *command, "--help", PYTHONPATH=paths)
        assert done.returncode == 0 and "evaluate" in done.stdout and not executed(), done.stderr


def test_the_working_directory_comes_back_last_with_the_users_word(monkeypatch):
    here = os.getcwd()
    monkeypatch.setattr(sys, "path", ["", here, *sys.path])
    trust.leave_working_directory()
    assert here not in sys.path and "" not in sys.path
    trust.allow("timm:resnet18")
    trust.allow("digits")
    trust.allow(None)
    assert here not in sys.path and trust.allowed() == []
    trust.allow("evil:build")
    assert sys.path[-1] == here and trust.allowed() == ["evil:build"]


def test_a_working_directory_that_the_user_named_stays(monkeypatch):
    here = os.getcwd()
    monkeypatch.setattr(sys, "path", [here, *sys.path])
    monkeypatch.setenv("PYTHONPATH", here)
    trust.leave_working_directory()
    assert here in sys.path


def test_a_deleted_working_directory(tmp_path, monkeypatch):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    trust.leave_working_directory()
    trust.allow("evil:build")
    assert trust.allowed() == ["evil:build"]


def test_optg_imports_nothing_before_it_leaves_the_working_directory():
    program = "import sys; before = set(sys.modules); import optg.trust; print(*sorted(set(sys.modules) - before))"
    assert run(sys.executable, "-c", program).stdout.split() == ["optg", "optg.trust"]
    assert optg.sparsify  # still found
