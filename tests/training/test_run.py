"""Whole runs through the command line: interrupted, killed, damaged, spread over processes, and given nonsense."""

import json
import math
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from optg import cli
from optg.training import recipe
from optg.training.board import SCALARS
from optg.training.folder import RunFolder
from optg.training.recipe import Plan, Recipe
from optg.training.run import refuse_other_plan

ROOT = Path(__file__).parent.parent.parent
PATHS = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1", "PYTHONPATH": os.pathsep.join(PATHS)}
OWN = ["--model", "tests.training.own:model", "--data", "tests.training.own:data"]
SMALL = [*OWN, "--epochs", "6", "--batch-size", "16", "--sparsity", "0.9", "--device", "cpu", "--minutes", "0.001"]
SLOW = ["--model", "tests.training.own:slow"]
KILLS = int(os.environ.get("OPTG_KILLS", "6"))


def optg(*args: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    output = ["--output", str(folder)] if folder else []
    command = [sys.executable, "-m", "optg", *args, *output]
    return subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, cwd=ROOT)


def start(folder: Path, *args: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "optg", "train", *SMALL, *args, "--output", str(folder)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT, cwd=ROOT)


def wait_for_checkpoint(folder: Path, process: subprocess.Popen[str]) -> None:
    while process.poll() is None and not list((folder / "checkpoints").glob("step-*")):
        time.sleep(0.01)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "undisturbed"
    done = optg("train", *SMALL, folder=folder)
    assert done.returncode == 0, done.stderr
    return folder


def test_what_a_run_leaves(undisturbed):
    summary = json.loads((undisturbed / "summary.json").read_text())
    assert summary["sparsity"] == pytest.approx(0.9, abs=1e-3) and summary["method"] == "optg"
    weights = load_file(undisturbed / "model.safetensors")
    zeros = sum(int((t == 0).sum()) for name, t in weights.items() if name.endswith("weight"))
    size = sum(t.numel() for name, t in weights.items() if name.endswith("weight"))
    assert zeros / size == summary["sparsity"]
    rows = [json.loads(line) for line in (undisturbed / "metrics.jsonl").read_text().splitlines()]
    assert [row["epoch"] for row in rows] == [1, 2, 3, 4, 5, 6] and rows[-1]["accuracy"] == summary["accuracy"]
    assert rows[-1]["removed"] == rows[-1]["revived"] == 0  # the last cut is at the start of the last epoch
    for row, before in zip(rows[1:], rows):
        zeros, zeros_before = (sum(layer[0] for layer in r["layers"].values()) for r in (row, before))
        assert zeros == round(row["sparsity"] * size) and zeros - zeros_before == row["removed"] - row["revived"]
    sigmoid = [1 / (1 + math.exp(-40 / 6 * (k - 6 / 2))) for k in range(1, 7)]  # Eq. 16, α = 40 / epochs
    assert [row["score_lr"] / row["lr"] for row in rows] == pytest.approx(sigmoid)
    assert summary["processes"] == 1 and summary["unreadable"] == 0


def call(monkeypatch, *args: str) -> None:
    """The command, in this process."""
    monkeypatch.setattr(sys, "argv", ["optg", *args])
    cli.main()


def test_a_run_can_be_trained_again_from_its_recipe(undisturbed, tmp_path):
    recipe = str(undisturbed / "recipe.toml")
    assert optg("train", "--recipe", recipe, "--device", "cpu", folder=tmp_path / "again").returncode == 0
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (undisturbed / "model.safetensors").read_bytes()


def test_checkpoints_are_summed_up_and_tested_too(undisturbed, monkeypatch, capsys):
    call(monkeypatch, "evaluate", str(undisturbed), "--device", "cpu")
    newest = str(max((undisturbed / "checkpoints").glob("step-*")))
    call(monkeypatch, "evaluate", newest, "--device", "cpu")
    first, second = capsys.readouterr().out.splitlines()
    accuracy = json.loads((undisturbed / "summary.json").read_text())["accuracy"]
    assert first == second and first.startswith(f"accuracy {accuracy:.2%}  loss")
    for what in (str(undisturbed), newest):
        call(monkeypatch, "summary", what)
    first, second = (text.splitlines() for text in capsys.readouterr().out.split("all parameters")[:2])
    assert len(first) > 6 and [line for line in first if "weight" in line] == [line for line in second if "weight" in line]


def test_an_interrupted_epoch_has_one_whole_row(undisturbed, tmp_path, monkeypatch, capsys):
    folder = tmp_path / "stopped"
    command = ("train", *SMALL, "--model", "tests.training.own:stopping", "--minutes", "60", "--output", str(folder))
    for step in (15, 20, 60):
        with pytest.raises(SystemExit, match="143"):
            call(monkeypatch, *command)
        assert f"stopped at step {step} of 60" in capsys.readouterr().err
        with (folder / "metrics.jsonl").open("a") as file:  # as if killed after the row and before the next checkpoint
            file.write(json.dumps({"step": -(-step // 10) * 10}) + "\n")
    call(monkeypatch, *command)
    rows, expected = ([json.loads(line) for line in open_lines(f / "metrics.jsonl")] for f in (folder, undisturbed))
    for row in rows + expected:
        assert row.pop("seconds") > 0 and row.pop("images_per_second") > 0
    assert rows == expected
    assert json.loads((folder / "summary.json").read_text())["accuracy"] == expected[-1]["accuracy"]


def test_tensorboard_has_each_epoch_once_however_often_a_run_was_killed(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = tmp_path / "board"
    for until in (20, 30):
        process = start(folder, *SLOW, "--tensorboard", "--minutes", "0.2")  # so that epochs are done again
        while process.poll() is None and len(list(open_lines(folder / "metrics.jsonl"))) * 10 < until:
            time.sleep(0.005)
        process.kill()
        process.communicate()
    assert optg("train", *SMALL, *SLOW, "--tensorboard", folder=folder).returncode == 0
    board = EventAccumulator(str(folder / "tensorboard"))
    board.Reload()
    rows = [json.loads(line) for line in open_lines(folder / "metrics.jsonl")]
    assert set(board.Tags()["scalars"]) == set(SCALARS)
    for name in set(SCALARS) - {"images_per_second"}:
        points = board.Scalars(name)
        assert [point.step for point in points] == [1, 2, 3, 4, 5, 6]
        assert [point.value for point in points] == pytest.approx([row[name] for row in rows])


def test_without_tensorboard_nothing_is_begun(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)  # as where it is not installed
    with pytest.raises(SystemExit, match="2"):
        call(monkeypatch, "train", "--tensorboard", "--output", str(tmp_path / "run"))
    assert "pip install 'optg[tensorboard]'" in capsys.readouterr().err and not (tmp_path / "run").exists()


def open_lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def test_killed_at_any_moment_it_ends_with_the_same_bytes(tmp_path):
    rng, folder, whole, reached = random.Random(0), tmp_path / "killed", tmp_path / "whole", []
    assert optg("train", *SMALL, "--epochs", "150", folder=whole).returncode == 0
    for _ in range(KILLS):
        process, before = start(folder, "--epochs", "150"), newest_step(folder)
        while process.poll() is None and newest_step(folder) == before:  # until it trains again
            time.sleep(0.002)
        time.sleep(rng.uniform(0, 0.15))
        process.kill()
        process.communicate()
        reached.append(newest_step(folder))
    assert reached == sorted(reached) and len(set(reached)) > KILLS // 2  # most of them were in the middle of training
    assert optg("train", *SMALL, "--epochs", "150", folder=folder).returncode == 0
    assert (folder / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    rows = [json.loads(line)["epoch"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert rows == list(range(1, 151))


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_saves_and_the_same_command_goes_on(undisturbed, tmp_path, number, code):
    folder = tmp_path / "stopped"
    process = start(folder, "--minutes", "60")
    while process.poll() is None and not (folder / "metrics.jsonl").exists():
        time.sleep(0.005)
    process.send_signal(number)
    _, errors = process.communicate()
    assert process.returncode == code, errors
    assert "the same command goes on from there" in errors and "Traceback" not in errors
    assert len(list((folder / "checkpoints").glob("step-*"))) == 1
    on = optg("train", *SMALL, "--minutes", "60", folder=folder)
    assert "going on from step-" in on.stdout
    assert (folder / "model.safetensors").read_bytes() == (undisturbed / "model.safetensors").read_bytes()


def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(undisturbed, tmp_path):
    folder = tmp_path / "damaged"
    process = start(folder)
    while process.poll() is None and len(list((folder / "checkpoints").glob("step-*"))) < 2:
        time.sleep(0.005)
    process.kill()
    process.communicate()
    newest = max((folder / "checkpoints").glob("step-*"))
    content = bytearray((newest / "tensors.safetensors").read_bytes())
    content[len(content) // 2] ^= 1
    (newest / "tensors.safetensors").write_bytes(content)
    on = optg("train", *SMALL, folder=folder)
    assert on.returncode == 0 and f"checkpoint {newest.name} is damaged" in on.stdout.replace("\n", " ")
    assert (folder / "model.safetensors").read_bytes() == (undisturbed / "model.safetensors").read_bytes()


def test_a_folder_in_use_is_refused(tmp_path):
    process = start(tmp_path / "busy", "--epochs", "500")
    wait_for_checkpoint(tmp_path / "busy", process)
    second = optg("train", *SMALL, "--epochs", "500", folder=tmp_path / "busy")
    process.kill()
    process.communicate()
    assert second.returncode == 2 and "is in use by another process" in second.stderr


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        ([], "the loss is nan at step 13; first non-finite gradient: inner.1.weight"),
        (
            ["--method", "rigl", "--method.every", "4"],
            "step 13: NaN in the scores of inner.1.weight",
        ),  # an exchange meets it first
    ],
)
def test_a_loss_that_is_no_number_stops_with_step_layer_and_checkpoint(tmp_path, method, expected):
    wrong = optg("train", *SMALL, "--model", "tests.training.own:diverging", *method, folder=tmp_path / "nan")
    assert wrong.returncode == 2 and "Traceback" not in wrong.stderr
    assert expected in wrong.stderr
    assert "step-0000000" in wrong.stderr


def torchrun(processes: int, folder: Path, parallel: str, *options: str) -> list[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), *options]
    return [*launcher, "-m", "optg", "train", *SMALL, "--parallel", parallel, "--output", str(folder)]


def newest_step(folder: Path) -> int:
    return max((int(path.name[5:]) for path in (folder / "checkpoints").glob("step-*")), default=0)


def masks(folder: Path) -> dict[str, object]:
    return {name: (t != 0).tolist() for name, t in load_file(folder / "model.safetensors").items() if name.endswith("weight")}


def with_two(folder: Path, parallel: str) -> Path:
    done = subprocess.run(torchrun(2, folder, parallel), capture_output=True, text=True, env=ENVIRONMENT, cwd=ROOT)
    assert done.returncode == 0, done.stderr[:5000]
    return folder


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> Path:
    return with_two(tmp_path_factory.mktemp("two") / "ddp", "ddp")


def test_two_processes_end_with_the_masks_of_one(undisturbed, two, tmp_path):
    assert masks(two) == masks(undisturbed)
    assert masks(with_two(tmp_path / "fsdp", "fsdp")) == masks(undisturbed)


def test_a_worker_that_dies_is_replaced_and_the_run_goes_on(two, tmp_path):
    folder = tmp_path / "elastic"
    command = torchrun(2, folder, "ddp", "--max-restarts", "1")
    log = (tmp_path / "log").open("w")
    process = subprocess.Popen(
        [*command, "--model", "tests.training.own:slow"], env=ENVIRONMENT, cwd=ROOT, stdout=log, stderr=log
    )
    while process.poll() is None and newest_step(folder) < 10:
        time.sleep(0.01)
    workers = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True).stdout.split()
    os.kill(int(workers[-1]), signal.SIGKILL)
    assert process.wait() == 0, (tmp_path / "log").read_text()[-3000:]
    assert "going on from step-" in (tmp_path / "log").read_text()
    assert (folder / "model.safetensors").read_bytes() == (two / "model.safetensors").read_bytes()


def test_four_processes_then_two_then_one(undisturbed, tmp_path):
    folder = tmp_path / "shrinking"
    for processes, until in ((4, 15), (2, 35)):
        command = torchrun(processes, folder, "fsdp")
        log = (tmp_path / f"{processes}.log").open("w")
        process = subprocess.Popen(command, env=ENVIRONMENT, cwd=ROOT, stdout=log, stderr=log)
        while process.poll() is None and newest_step(folder) < until:
            time.sleep(0.01)
        assert process.poll() is None, (tmp_path / f"{processes}.log").read_text()[-3000:]
        process.terminate()  # torchrun passes it on: all finish the step, the first saves
        process.wait()
    if newest_step(folder) == 60:  # the signal came after the last step: one process goes on from the checkpoint before
        shutil.rmtree(folder / "checkpoints" / "step-000000060")
    assert until <= newest_step(folder) < 60
    assert optg("train", *SMALL, folder=folder).returncode == 0
    assert masks(folder) == masks(undisturbed)


@pytest.mark.parametrize(
    "args, message",
    [
        (["train", "--recipe", "vgg19-cifar1"], "unknown recipe 'vgg19-cifar1'; did you mean 'vgg19-cifar10'"),
        (["train", "--recipe", "nowhere.toml"], "there is no recipe file nowhere.toml"),
        (["train", "--recipe"], "--recipe needs a value"),
        (["train", "--method", "rigle"], "unknown method 'rigle'; did you mean 'rigl'?"),
        (["train", "--epoch", "3"], "--epochs"),
        (["train", "--method", "rigl", "--method.fractoin", "0.3"], "--method.fraction"),
        (["train", "--epochs", "many"], "invalid"),
        (["train", "--sparsity", "95"], "sparsity is 95.0; expected at least 0 and below 1"),
        (["train", "--lr", "-1"], "lr is -1.0; expected above 0"),
        (["train", "--batch-size", "0"], "batch_size is 0"),
        (["train", "--batch-size", "5000"], "batch"),
        (["train", "--epochs", "1"], "epochs is 1, expected at least 2"),
        (["train", "--model", "resnet21"], "unknown model 'resnet21'"),
        (["train", "--model", "no.such.module:f"], "no.such.module"),
        (["train", "--data", "cifar11"], "unknown"),
        (["train", "--data", "cifar10", "--folder", "/nonexistent"], "CIFAR-10"),
        (["train", "--data", "imagenet", "--folder", "/nonexistent"], "/nonexistent"),
        (["train", "--device", "gpu"], "unknown device 'gpu'; expected auto, cuda, cuda:N or cpu"),
        (["train", "--keep", "0"], "keep is 0"),
        (["train", "--minutes", "0"], "minutes 0.0"),
        (["train", "--parallel", "ddp"], "--parallel ddp needs torchrun"),
        (["train", "--method", "dense", "--sparsity", "0.5"], "dense training removes nothing"),
        (["evaluate", "/nonexistent"], "is not the folder of a run"),
        (["summary", "/nonexistent"], "there is no folder /nonexistent"),
        (["recipes", "digit"], "unknown recipe 'digit'; did you mean 'digits'"),
        (["nonsense"], "nonsense"),
    ],
)
def test_bad_input_gets_one_clear_message_and_no_folder(args, message, tmp_path, monkeypatch, capsys):
    output = ["--output", str(tmp_path / "run")] if args[0] == "train" else []
    with pytest.raises(SystemExit) as left:
        call(monkeypatch, *args, *output)
    said = capsys.readouterr().err
    assert left.value.code == 2 and message in said and "Traceback" not in said
    assert not (tmp_path / "run").exists()


def test_another_recipe_in_the_same_folder_is_refused(undisturbed):
    wrong = optg("train", *SMALL, "--lr", "0.01", folder=undisturbed)
    assert wrong.returncode == 2 and "lr = 0.01" in wrong.stderr and "give another --output" in wrong.stderr


def test_data_may_have_moved_since(tmp_path):
    folder = RunFolder(tmp_path)
    before, after = Plan(Recipe(folder="/here")), Plan(Recipe(folder="/there"))
    (tmp_path / "recipe.toml").write_text(recipe.dump(before))
    refuse_other_plan(after, folder)
    after.recipe.lr = 0.3
    refuse_other_plan(after, folder)  # there is nothing to lose yet
    (folder.checkpoints / "step-000000001").mkdir(parents=True)
    with pytest.raises(recipe.RecipeError, match=r"\(lr = 0.3 is new\)"):
        refuse_other_plan(after, folder)
    before.methods = {"optg": {"alpha": 1.0}}
    (tmp_path / "recipe.toml").write_text(recipe.dump(before))
    with pytest.raises(recipe.RecipeError, match=r"\(\[methods.\"optg\"\]; alpha = 1.0 is gone\)"):
        refuse_other_plan(Plan(before.recipe), folder)


def test_a_run_that_failed_at_once_does_not_stand_in_the_way(tmp_path, monkeypatch, capsys):
    command = ("train", *SMALL, "--epochs", "2", "--output", str(tmp_path / "run"))
    with pytest.raises(SystemExit, match="2"):
        call(monkeypatch, *command, "--model", "resnet20")
    assert "resnet20 does not take images of" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_finished_run_is_left_as_it_is(undisturbed, tmp_path, monkeypatch):
    folder = tmp_path / "copy"
    shutil.copytree(undisturbed, folder)
    shutil.rmtree(folder / "checkpoints")
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    call(monkeypatch, "train", *SMALL, "--keep", "3", "--output", str(folder))
    assert before == {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


@pytest.mark.parametrize("harm", ["last", "all", "garbage", "gone"])
def test_a_lost_row_of_metrics_costs_no_accuracy(undisturbed, tmp_path, monkeypatch, harm):
    folder = tmp_path / "copy"
    shutil.copytree(undisturbed, folder)
    expected = json.loads((folder / "summary.json").read_text())["accuracy"]
    lines = open_lines(folder / "metrics.jsonl")
    assert json.loads(lines[-2])["accuracy"] != expected
    (folder / "summary.json").unlink()
    left = {"last": "\n".join(lines[:-1]) + "\n" + lines[-1][:-20], "all": "", "garbage": '[1, 2]\n{"epoch": 3}\n\udcff\n'}
    (folder / "metrics.jsonl").write_text(left.get(harm, ""), errors="surrogateescape")
    if harm == "gone":
        (folder / "metrics.jsonl").unlink()
    call(monkeypatch, "train", *SMALL, "--output", str(folder))
    assert json.loads((folder / "summary.json").read_text())["accuracy"] == expected


def test_who_stops_reading_stops_the_run_and_loses_nothing(undisturbed, tmp_path):
    folder = tmp_path / "run"
    process = start(folder)
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(60) == 143, process.stderr and process.stderr.read()
    assert list((folder / "checkpoints").glob("step-*"))
    assert optg("train", *SMALL, folder=folder).returncode == 0
    assert (folder / "model.safetensors").read_bytes() == (undisturbed / "model.safetensors").read_bytes()


def test_new_files_can_be_read_by_whoever_may(undisturbed):
    modes = {path.stat().st_mode & 0o777 for path in undisturbed.rglob("*") if path.is_file()}
    assert len(modes) == 1


def test_a_command_can_be_given_again(tmp_path, monkeypatch):
    folder = tmp_path / "a run, <b>ü"
    call(monkeypatch, "train", *SMALL, "--epochs", "2", "--output", str(folder))
    assert shlex.split(json.loads((folder / "summary.json").read_text())["command"])[-1] == str(folder)


def test_an_error_in_ones_own_code_says_where(tmp_path):
    (tmp_path / "mine.py").write_text("def data(folder):\n    x, y, z = [1, 2]\n")
    command = [sys.executable, "-m", "optg", "train", "--data", "mine:data", "--output", str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, cwd=tmp_path)
    assert done.returncode == 1 and "mine.py" in done.stderr and "line 2" in done.stderr


@pytest.mark.parametrize("name", ["digits", "vgg19"])
def test_models_have_a_shape_of_their_own(name, monkeypatch, capsys):
    call(monkeypatch, "summary", name)
    assert "all parameters" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        call(monkeypatch, "summary", name, "--shape", "2", "8", "8")
    assert f"{name} does not take images of 2×8×8; give another --shape" in capsys.readouterr().err
