"""ONNX files: checked with onnxruntime before they appear."""

import os
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from optg.data import digits
from optg.deploy.export import open_trained
from optg.deploy.onnx import write_onnx
from tests.deploy.conftest import Cli


def write_other_model(path: Path, model: torch.nn.Module, example: torch.Tensor, value: float = 0.0) -> None:
    """Write an ONNX file that does not compute what the model computes."""
    other = torch.nn.Sequential(model, torch.nn.Threshold(0.1, value))
    write_onnx(path, other, example)


def test_onnx_file_is_checked_with_onnxruntime(
    trained_run: Path, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(package)
    import onnxruntime

    code, out, err = cli("export", trained_run, "--to", "onnx", "--output", tmp_path / "m.onnx")
    assert code == 0 and "onnxruntime's outputs differ by at most" in out and not err
    session = onnxruntime.InferenceSession(str(tmp_path / "m.onnx"))
    _, (images, _) = digits.load()
    outputs = session.run(None, {"images": images[:7].numpy()})[0]
    with torch.no_grad():
        assert np.allclose(outputs, open_trained(trained_run).model(images[:7]), rtol=1e-5, atol=1e-5)
    assert cli("export", trained_run, "--output", tmp_path / "m.optg")[0] == 0
    code, out, err = cli("export", tmp_path / "m.optg", "--to", "onnx", "--output", tmp_path / "packed.onnx")
    assert code == 0 and "onnxruntime's outputs differ by at most" in out and not err
    session = onnxruntime.InferenceSession(str(tmp_path / "packed.onnx"))
    assert np.allclose(session.run(None, {"images": images[:7].numpy()})[0], outputs, rtol=1e-5, atol=1e-5)
    for name in ("m.optg", "packed.onnx"):
        (tmp_path / name).unlink()
    before = (tmp_path / "m.onnx").read_bytes()
    monkeypatch.setattr("optg.deploy.onnx.write_onnx", write_other_model)
    code, _, err = cli("export", trained_run, "--to", "onnx", "--output", tmp_path / "m.onnx")
    assert code == 2 and "differ from torch's by" in err
    monkeypatch.setattr("optg.deploy.onnx.write_onnx", partial(write_other_model, value=torch.nan))
    code, _, err = cli("export", trained_run, "--to", "onnx", "--output", tmp_path / "m.onnx")
    assert code == 2 and "differ from torch's by nan" in err
    assert (tmp_path / "m.onnx").read_bytes() == before and os.listdir(tmp_path) == ["m.onnx"]


def test_missing_onnx_packages_are_named(trained_run: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("optg.deploy.onnx.find_spec", lambda name: None)
    code, _, err = cli("export", trained_run, "--to", "onnx")
    assert code == 2 and err == "optg: this needs onnx, onnxscript, onnxruntime; install with: pip install 'optg[onnx]'\n"
