"""`optg bench` on the command line."""

import json
from pathlib import Path

import pytest
import torch

from optg.deploy.bench.command import describe_hardware
from optg.deploy.bench.engines import ENGINES
from tests.deploy.conftest import Cli


def test_command_measures_and_writes_json_and_plot(cli: Cli, tmp_path: Path) -> None:
    args = ("--engines", "optg", "torch", "--batches", "1", "3", "--threads", "1", "--seconds", "0.05")
    code, out, err = cli("bench", "digits", "--sparsity", "0.95", *args, "--output", "b.json", "--plot", "b.png")
    assert code == 0 and not err
    assert "digits with random weights and random ERK masks of sparsity 0.95" in out and "batch 3, 1 thread" in out
    assert "the best other engine in float32" in out
    found = json.loads((tmp_path / "b.json").read_text())
    assert [(t["engine"], t["batch"], t["threads"]) for t in found["timings"]] == [
        *(("optg", 1, 1), ("torch", 1, 1), ("optg", 3, 1), ("torch", 3, 1)),
    ]
    for t in found["timings"]:
        assert 0 < t["low"] <= t["milliseconds"] <= t["high"] and t["calls"] >= 5 and t["difference"] < 1e-5
        assert t["images_per_second"] == pytest.approx(1000 * t["batch"] / t["milliseconds"])
    assert found["subject"]["parameters"] == 98_026 and found["subject"]["nonzero"] == 98_026 - 92_690
    assert found["subject"]["packed_bytes"] < 0.1 * found["subject"]["dense_bytes"]
    assert (tmp_path / "b.png").read_bytes().startswith(b"\x89PNG")


def test_a_gpu_is_named_if_an_engine_uses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "A GPU")
    engines = {engine.name: engine for engine in ENGINES}
    assert "GPU" not in describe_hardware([engines["torch"]])
    assert describe_hardware([engines["torch"], engines["gpu bf16 shrunk"]]).endswith(", A GPU")


def test_wrong_arguments_give_a_one_line_error(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no model")
    for args, message in (
        (("no-such-model",), "unknown model 'no-such-model'"),
        (("runs/none",), "there is no runs/none"),
        (("text",), "not a packed model"),
        (("digits", "--batches", "0"), "--batches is 0; expected"),
        (("digits", "--threads", "-1"), "--threads is -1; expected"),
        (("digits", "--seconds", "0"), "--seconds is 0; expected above 0"),
        (("digits", "--sparsity", "1"), "--sparsity is 1; expected"),
        (("text", "--sparsity", "0.5"), "text is measured as it is; leave out --sparsity"),
        (("digits", "--shape", "3", "8", "8"), "digits does not take images of 3×8×8; give another --shape"),
        (("digits", "--engines", "onnxruntim"), "unknown engine 'onnxruntim'; did you mean 'onnxruntime'?"),
        (("digits", "--plot", "a.txt"), "should end in .png, .svg or .pdf"),
        (("digits", "--output", "no/a.json"), "there is no folder no"),
    ):
        code, out, err = cli("bench", *args)
        assert code == 2 and message in err and err.count("\n") == 1 and not out.strip(), (args, err)
