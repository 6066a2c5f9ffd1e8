"""`optg reproduce` from its flags to its tables, with very small models."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import tyro

from optg.experiments.command import Reproduce, build_selection, reproduce
from optg.experiments.records import finished_runs, read_records, records_beside

TINY = {"model": "digits", "data": "synthetic:1x8x8:10:256", "set": ("batch_size=64",), "device": "cpu", "jobs": 0}


def flags(*names: str, **values: Any) -> Reproduce:
    """Return the options of `optg reproduce`, each flag in its group."""
    options = Reproduce(names)
    for key, value in values.items():
        group = next(g for g in (options, options.which, options.change, options.execution) if key in vars(g))
        setattr(group, key, value)
    return options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"names": ("cifar",), "results": Path("R.md")}, "cifar has no effect on --results, which covers all experiments"),
        ({"results": Path("R.md"), "jobs": 3}, "--jobs has no effect on --results, .*; remove one of them"),
        ({"names": ("nosuch",), "list": True}, "nosuch has no effect on --list"),
        ({"plan": True}, "--plan needs the name of an experiment"),
        ({"record": Path("a.jsonl")}, "--record needs the name of an experiment"),
        ({"names": ("alpha",), "plot": Path("a.svg")}, "--plot needs one experiment whose columns are sparsities"),
        ({"names": ("extreme", "cifar"), "plot": Path("a.svg")}, "--plot needs one experiment"),
        ({"names": ("extreme",), "against": "flops"}, "--against flops has no effect without --plot FILE"),
    ],
)
def test_flags_without_effect_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        reproduce(flags(*options.pop("names", ()), **options))


@pytest.mark.parametrize("others", [["--table"], ["--plan"], ["--results", "R.md"]])
def test_only_one_thing_can_be_done_instead_of_running(others, capsys):
    with pytest.raises(SystemExit):
        tyro.cli(Reproduce, args=["cifar", "--list", *others])
    assert "not allowed together" in capsys.readouterr().err


def test_a_repeated_dataset_sparsity_or_seed_counts_once():
    selection = build_selection(flags("cifar", on=("cifar10", "cifar10"), sparsity=(0.9, 0.9), seeds=(1, 1)))
    assert (selection.on, selection.sparsity, selection.seeds) == (("cifar10",), (0.9,), (1,))


def test_the_time_limit_works_in_this_process_too(tmp_path):
    options = flags("cifar", epochs=500, minutes=0.05, only=("gmp", "optg"), columns=("95",), output=tmp_path, **TINY)
    started = time.monotonic()
    assert reproduce(options) == 130 and time.monotonic() - started < 60
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0


@pytest.mark.long
def test_all_of_table_1_in_one_epoch(tmp_path, capsys):
    """`optg reproduce cifar` with a tiny model: every method is trained, recorded and shown in the table."""
    options = flags("cifar", epochs=1, output=tmp_path / "runs", record=tmp_path / "a.jsonl", **TINY)
    assert reproduce(options) == 0
    printed = capsys.readouterr().out
    summaries = read_records(tmp_path / "a.jsonl")
    methods = {"dense", "set", "snip", "grasp", "synflow", "str", "rigl", "gmp", "granet", "optg"}
    assert {s["method"] for s in summaries} == methods
    assert len(summaries) == 25  # on CIFAR-100, grasp uses more batches and str other decays
    sparse = [s for s in summaries if s["method"] not in ("dense", "str")]
    assert all(abs(s["sparsity"] - s["settings"]["sparsity"]) < 1e-4 for s in sparse)
    assert {s["command"].split()[1] for s in summaries} == {"train"}
    optg = next(s for s in summaries if s["method"] == "optg")
    assert f"{100 * optg['accuracy']:.2f}" in printed and "Table 1" in printed and "batch size" in printed
    assert reproduce(options) == 0 and "25 runs, 25 finished before" in capsys.readouterr().out
    options.table = True
    assert reproduce(options) == 0 and "finished before" not in capsys.readouterr().out


def test_several_experiments_share_their_runs_and_jobs(tmp_path, capsys):
    names = ("budgets", "alpha", "schedules", "budgets")
    with pytest.raises(ValueError, match="schedules is drawn"):
        reproduce(flags(*names, epochs=80, output=tmp_path, **TINY))
    options = flags(*names[:2], output=tmp_path, **{**TINY, "data": "synthetic:1x8x8:10:64"})
    assert reproduce(options) == 0
    printed = capsys.readouterr().out
    assert "6 runs, 0 finished before" in printed  # 4 + 3, with OptG's default α in both
    assert printed.index("Table A3") < printed.index("Table A4")
    assert reproduce(flags("alpha", "schedules", "alpha", output=tmp_path, table=True)) == 0
    printed = capsys.readouterr().out
    assert printed.count("Table A4") == 1 and "schedules.png" in printed


def test_a_signal_before_training_stops_immediately(tmp_path, monkeypatch, capsys):
    """With jobs=0, a run that is still being set up has nothing to save."""
    from optg.training import run

    def interrupt(*args):
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(run, "set_up", interrupt)
    assert reproduce(flags("alpha", output=tmp_path, **TINY)) == 130
    assert "stopped with 0 of 3 runs finished; run the same command again to continue" in capsys.readouterr().out


def test_masks_are_trained_on_the_weights_of_a_trained_model(tmp_path):
    from safetensors.torch import load_file

    chosen = {"epochs": 2, "output": tmp_path / "runs", "sparsity": (0.9,), "only": ("trained weights",)}
    assert reproduce(flags("supermasks", **chosen, **TINY)) == 0
    dense, trained = sorted((tmp_path / "runs").glob("*seed0"), key=lambda path: "trained" in path.name)
    before, after = load_file(dense / "model.safetensors"), load_file(trained / "model.safetensors")
    name = "4.weight"
    assert before[name].ndim == 4
    layer = after[name]
    kept = layer != 0
    assert 0.05 < kept.float().mean() < 0.2 and layer[kept].equal(before[name][kept])


def test_a_model_that_others_start_from_is_trained_again_but_its_record_stays(tmp_path):
    chosen = {"epochs": 1, "sparsity": (0.9,), **TINY}
    first, second = tmp_path / "results" / "a.jsonl", tmp_path / "results" / "b.jsonl"
    assert reproduce(flags("supermasks", only=("dense",), output=tmp_path / "one", record=first, **chosen)) == 0
    [line] = read_records(first)
    first.write_text(json.dumps({**line, "accuracy": 0.123}) + "\n")
    only = ("trained weights", "dense")
    assert reproduce(flags("supermasks", only=only, output=tmp_path / "two", record=second, **chosen)) == 0
    assert [path.parent.name.split("-")[2] for path in (tmp_path / "two").glob("*/model.safetensors")].count("dense") == 1
    assert [row["method"] for row in read_records(second)] == ["supermask"]
    known = finished_runs(tmp_path / "two", records_beside(second)).values()
    assert [row["accuracy"] for row in known if row["method"] == "dense"] == [0.123]


def test_a_failed_run_reports_its_reason(tmp_path, capsys):
    options = flags("dormant-decay", output=tmp_path / "runs", **{**TINY, "data": "synthetic:nonsense"})
    assert reproduce(options) == 1
    assert "unknown dataset 'synthetic:nonsense'" in capsys.readouterr().out


def test_the_command_line(tmp_path):
    """One run in its own process, and an error in one line."""
    command = [sys.executable, "-m", "optg", "reproduce", "budgets", "--only", "ERK", "--epochs", "2"]
    command += ["--output", str(tmp_path)]
    small = ["--model", "digits", "--data", "synthetic:1x8x8:10:64", "--set", "batch_size=32", "precision=float32"]
    done = subprocess.run([*command, *small, "--device", "cpu"], capture_output=True, text=True)
    assert done.returncode == 0 and "1/1" in done.stdout and "ERK" in done.stdout, done.stdout + done.stderr
    wrong = subprocess.run([*command, "--set", "lr"], capture_output=True, text=True)
    assert (
        wrong.returncode == 2 and wrong.stderr == "optg: --set 'lr'; expected a setting and its value, such as batch_size=256\n"
    )
