"""TensorBoard, Weights & Biases and MLflow, each for real and without a network, in a run that is interrupted twice."""

import json
import time
from pathlib import Path

import pytest

from optg.training.loggers import LOGGERS, SCALARS
from tests.cli.calling import call, refusal
from tests.training.runs import SMALL, read_lines


@pytest.fixture
def train(tmp_path, monkeypatch):
    """Return a function that trains with loggers for 30 steps, stopped after 15 and 20, in `tmp_path / "run"`."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file://{tmp_path / 'mlruns'}")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # a database would need more packages
    length = ("--epochs", "3", "--method", "gmp", "--minutes", "60")
    stopping = ("--model", "tests.training.user_code:stopping")

    def run(*flags: str, pause: float = 0.0) -> list[dict]:
        command = ("train", *SMALL, *stopping, *length, *flags, "--output", tmp_path / "run")
        for _ in range(2):
            with pytest.raises(SystemExit, match="143"):
                call(monkeypatch, *command)
            time.sleep(pause)
        call(monkeypatch, *command)
        return [json.loads(line) for line in read_lines(tmp_path / "run" / "metrics.jsonl")]

    return run


@pytest.mark.parametrize("flags", [("--tensorboard",), ("--log", "tensorboard"), ("--tensorboard", "--log", "tensorboard")])
def test_tensorboard(train, tmp_path, flags):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    rows = train(*flags)
    board = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    board.Reload()
    assert set(board.Tags()["scalars"]) == set(SCALARS) - {"score_lr"}  # GMP has no scores
    assert [point.step for point in board.Scalars("accuracy")] == [1, 2, 3]
    assert [point.value for point in board.Scalars("loss")] == pytest.approx([row["loss"] for row in rows])


def test_wandb(train, tmp_path):
    rows = train("--log", "wandb", pause=1.1)  # wandb names folders by the second
    run_id = (tmp_path / "run" / "wandb-run-id").read_text()
    files = sorted((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb"))
    assert {file.name for file in files} == {f"run-{run_id}.wandb"}  # one run, continued
    written = b"".join(file.read_bytes() for file in files)
    for row in rows:
        for name in ("loss", "accuracy", "sparsity"):
            assert json.dumps(row[name]).encode() in written and name.encode() in written
    assert b"tests.training.user_code:stopping" in written  # the settings


def test_mlflow(train, tmp_path):
    from mlflow import MlflowClient

    rows = train("--log", "mlflow")
    client, run_id = MlflowClient(f"file://{tmp_path / 'mlruns'}"), (tmp_path / "run" / "mlflow-run-id").read_text()
    [run] = client.search_runs(["0"])
    assert run.info.run_id == run_id and run.info.run_name == "run" and run.info.status == "FINISHED"
    assert run.data.params["model"] == "tests.training.user_code:stopping" and run.data.params["method"] == "gmp"
    for name in ("loss", "accuracy", "sparsity", "lr"):
        points = client.get_metric_history(run_id, name)
        assert [(point.step, point.value) for point in points] == [(row["epoch"], row[name]) for row in rows]


def test_several_loggers_at_once(train, tmp_path):
    train("--log", "tensorboard", "mlflow")
    assert (tmp_path / "run" / "tensorboard").is_dir() and (tmp_path / "run" / "mlflow-run-id").exists()


def test_an_epoch_that_mlflow_has_already_is_not_logged_twice(tmp_path, monkeypatch):
    from mlflow import MlflowClient

    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file://{tmp_path / 'mlruns'}")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    for epochs in ((1, 2), (2, 3)):  # the second epoch was trained again
        logger = LOGGERS["mlflow"](tmp_path)
        logger.start("run", {})
        for epoch in epochs:
            logger.log(epoch, {"loss": 1.0 / epoch})
        logger.finish()
    client = MlflowClient(f"file://{tmp_path / 'mlruns'}")
    points = client.get_metric_history((tmp_path / "mlflow-run-id").read_text(), "loss")
    assert [point.step for point in points] == [1, 2, 3]


def test_a_logger_that_cannot_start_stops_the_run_with_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "nowhere://")
    message = refusal(monkeypatch, capsys, "train", *SMALL, "--log", "mlflow", "--output", Path(tmp_path / "run"))
    assert message.startswith("optg: --log mlflow cannot start: ") and message.count("\n") == 1
    assert "Set MLFLOW_TRACKING_URI to the address of a server" in message
