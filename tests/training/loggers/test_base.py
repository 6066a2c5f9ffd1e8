"""Loggers that are missing or fail."""

import sys
from types import ModuleType

import pytest

from optg.training.loggers import LOGGERS, Logger, RunLog, make_loggers


class Recorder(Logger):
    name = "recorder"

    def __init__(self, fails_at: str = "") -> None:
        self.fails_at, self.calls = fails_at, []

    def record(self, *call: object) -> None:
        if call[0] == self.fails_at:
            raise OSError("no network\nsecond line")
        self.calls.append(call)

    def start(self, run, settings):
        self.record("start", run, settings)

    def log(self, epoch, metrics):
        self.record("log", epoch, metrics)

    def finish(self):
        self.record("finish")


ROW = {"epoch": 1, "loss": 2.0, "accuracy": 0.5, "layers": {"a": [1, 2, 3]}, "step": 10}


def test_all_loggers_get_the_numbers_of_each_epoch():
    loggers = [Recorder(), Recorder()]
    log = RunLog(loggers)
    log.start("name", {"lr": 0.1})
    log.log(ROW)
    log.finish()
    log.finish()
    expected = [("start", "name", {"lr": 0.1}), ("log", 1, {"loss": 2.0, "accuracy": 0.5}), ("finish",)]
    assert [logger.calls for logger in loggers] == [expected, expected]


def test_a_logger_that_fails_during_training_is_switched_off():
    failing, other = Recorder("log"), Recorder()
    log = RunLog([failing, other])
    log.start("name", {})
    with pytest.warns(UserWarning, match=r"--log recorder failed and was switched off: no network\. metrics.jsonl has all"):
        log.log(ROW)
    log.log({**ROW, "epoch": 2})
    log.finish()
    assert [call[0] for call in other.calls] == ["start", "log", "log", "finish"]
    assert [call[0] for call in failing.calls] == ["start"]


def test_an_error_at_the_end_is_a_warning():
    log = RunLog([Recorder("finish")])
    log.start("name", {})
    with pytest.warns(UserWarning, match="--log recorder could not finish: no network"):
        log.finish()


def test_a_logger_that_cannot_start_is_an_error_of_one_line():
    with pytest.raises(ValueError, match=r"^--log recorder cannot start: no network$"):
        RunLog([Recorder("start")]).start("name", {})


@pytest.mark.parametrize("name", LOGGERS)
def test_a_missing_package_is_named_with_the_install_command(name, tmp_path, monkeypatch):
    install = rf"^--log {name} needs a missing package \(.+\); run: pip install 'optg\[{name}\]'$"
    monkeypatch.setitem(sys.modules, LOGGERS[name].package, None)
    with pytest.raises(ValueError, match=install):
        make_loggers([name], tmp_path)
    folder = ModuleType(LOGGERS[name].package)  # a folder of that name in the current directory can be imported
    folder.__file__ = None
    monkeypatch.setitem(sys.modules, LOGGERS[name].package, folder)
    with pytest.raises(ValueError, match=install):
        make_loggers([name], tmp_path)


def test_a_logger_named_twice_is_made_once(tmp_path):
    assert [logger.name for logger in make_loggers(["tensorboard", "mlflow", "tensorboard"], tmp_path)] == [
        "tensorboard",
        "mlflow",
    ]
