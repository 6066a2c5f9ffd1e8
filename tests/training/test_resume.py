"""Runs that are interrupted, killed or damaged resume, and end with the same bytes as an uninterrupted run."""

import json
import os
import random
import signal
import time

import pytest

from optg.training.loggers import SCALARS
from optg.training.loggers.tensorboard import TensorBoard
from tests.cli.calling import call
from tests.training.runs import SLOW, SMALL, newest_step, read_lines, start

KILLS = int(os.environ.get("OPTG_KILLS", "4"))
KILLED_EPOCHS = 25 * KILLS  # long enough for all kills to come during training


def test_an_interrupted_epoch_has_one_complete_row(undisturbed, tmp_path, monkeypatch, capsys):
    folder = tmp_path / "stopped"
    command = ("train", *SMALL, "--model", "tests.training.user_code:stopping", "--minutes", "60", "--output", str(folder))
    for step in (15, 20, 60):
        with pytest.raises(SystemExit, match="143"):
            call(monkeypatch, *command)
        assert f"Stopped at step {step} of 60" in capsys.readouterr().err
        with (folder / "metrics.jsonl").open("a") as file:  # as if killed after the row and before the next checkpoint
            file.write(json.dumps({"step": -(-step // 10) * 10}) + "\n")
    call(monkeypatch, *command)
    rows, expected = ([json.loads(line) for line in read_lines(f / "metrics.jsonl")] for f in (folder, undisturbed))
    for row in rows + expected:
        assert row.pop("seconds") > 0 and row.pop("images_per_second") > 0 and row.pop("checksum")
    assert rows == expected
    assert json.loads((folder / "summary.json").read_text())["accuracy"] == expected[-1]["accuracy"]


def test_tensorboard_files_of_one_second_keep_their_order(tmp_path):
    """A file's name is its second, host and process. Another process of the same second may have a larger number."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for epochs in ([1, 2, 3], [3, 4]):  # the first process is killed after epoch 3, and repeats it
        logger = TensorBoard(tmp_path)
        for epoch in epochs:
            logger.log(epoch, {"loss": float(10 * len(epochs) + epoch)})
        logger.finish()
        if epochs[0] == 1:
            [file] = (tmp_path / "tensorboard").iterdir()
            file.rename(file.with_name(".".join([*file.name.split(".")[:4], "zzz"])))
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    assert [(point.step, point.value) for point in board.Scalars("loss")] == [(1, 31.0), (2, 32.0), (3, 23.0), (4, 24.0)]


def test_tensorboard_has_each_epoch_once_however_often_a_run_was_killed(tmp_path, monkeypatch):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = tmp_path / "board"
    for until in (20, 30):
        process = start(folder, *SLOW, "--tensorboard", "--minutes", "0.2")  # seldom saved, so that epochs are trained again
        while process.poll() is None and len(list(read_lines(folder / "metrics.jsonl"))) * 10 < until:
            time.sleep(0.005)
        process.kill()
        process.communicate()
    call(monkeypatch, "train", *SMALL, "--tensorboard", *SLOW, "--output", folder)
    board = EventAccumulator(str(folder / "tensorboard"))
    board.Reload()
    rows = [json.loads(line) for line in read_lines(folder / "metrics.jsonl")]
    assert set(board.Tags()["scalars"]) == set(SCALARS)
    for name in set(SCALARS) - {"images_per_second"}:
        points = board.Scalars(name)
        assert [point.step for point in points] == [1, 2, 3, 4, 5, 6]
        assert [point.value for point in points] == pytest.approx([row[name] for row in rows])


def test_a_run_killed_at_random_moments_ends_with_the_same_bytes(tmp_path, monkeypatch):
    rng, folder, whole, reached = random.Random(0), tmp_path / "killed", tmp_path / "whole", []
    call(monkeypatch, "train", *SMALL, "--epochs", str(KILLED_EPOCHS), "--output", whole)
    for _ in range(KILLS):
        process, before = start(folder, "--epochs", str(KILLED_EPOCHS)), newest_step(folder)
        while process.poll() is None and newest_step(folder) == before:  # until it has resumed
            time.sleep(0.002)
        time.sleep(rng.uniform(0, 0.15))
        process.kill()
        process.communicate()
        reached.append(newest_step(folder))
    assert reached == sorted(reached) and len(set(reached)) > KILLS // 2  # most kills came in the middle of training
    call(monkeypatch, "train", *SMALL, "--epochs", str(KILLED_EPOCHS), "--output", folder)
    assert (folder / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    rows = [json.loads(line)["epoch"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert rows == list(range(1, KILLED_EPOCHS + 1))


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_saves_and_the_same_command_resumes(undisturbed, tmp_path, number, code, monkeypatch, capsys):
    folder = tmp_path / "stopped"
    process = start(folder, "--minutes", "60")
    while process.poll() is None and not (folder / "metrics.jsonl").exists():
        time.sleep(0.005)
    process.send_signal(number)
    _, errors = process.communicate()
    assert process.returncode == code, errors
    assert "To continue, give the same command again." in errors and "Traceback" not in errors
    assert len(list((folder / "checkpoints").glob("step-*"))) == 2  # of the first epoch, and of the signal
    call(monkeypatch, "train", *SMALL, "--minutes", "60", "--output", folder)
    assert "Resuming from step-" in capsys.readouterr().out
    assert (folder / "model.safetensors").read_bytes() == (undisturbed / "model.safetensors").read_bytes()


def test_a_damaged_checkpoint_is_named_and_the_previous_one_is_used(undisturbed, tmp_path, monkeypatch, capsys):
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
    call(monkeypatch, "train", *SMALL, "--output", folder)
    assert f"checkpoint {newest.name} is damaged" in capsys.readouterr().out.replace("\n", " ")
    assert (folder / "model.safetensors").read_bytes() == (undisturbed / "model.safetensors").read_bytes()


def test_a_closed_output_pipe_stops_the_run_after_saving(undisturbed, tmp_path, monkeypatch):
    folder = tmp_path / "run"
    process = start(folder)
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(60) == 143, process.stderr and process.stderr.read()
    assert list((folder / "checkpoints").glob("step-*"))
    call(monkeypatch, "train", *SMALL, "--output", folder)
    assert (folder / "model.safetensors").read_bytes() == (undisturbed / "model.safetensors").read_bytes()
