"""Each integration needs its own package only, and says which."""

import runpy
import sys
from pathlib import Path

import pytest

from tests.architecture.blocked import run_without

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize(
    ("module", "missing"), [("lightning", ("lightning", "pytorch_lightning")), ("transformers", ("transformers",))]
)
def test_a_missing_package_is_named_with_its_extra(module: str, missing: tuple[str, ...]) -> None:
    done = run_without(missing, f"import optg.integrations.{module}")
    assert done.returncode != 0
    assert f"pip install 'optg[{module}]'" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize(("trainer", "sparsity"), [("lightning", 0.95), ("transformers", 0.8), ("accelerate", 0.95)])
def test_an_example(trainer: str, sparsity: float, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    example = str(EXAMPLES / f"{trainer}_digits.py")
    monkeypatch.setattr(sys, "argv", [example, "--epochs", "2"])
    runpy.run_path(example, run_name="__main__")
    assert f"sparsity {sparsity:.4f}" in capsys.readouterr().out
