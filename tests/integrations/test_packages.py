"""Each integration needs its own package only, and says which."""

import runpy
import sys
from pathlib import Path

import pytest

from tests.architecture.blocked import run_without
from tests.integrations.test_lightning import fit
from tests.integrations.test_transformers import train

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize(
    ("module", "missing"), [("lightning", ("lightning", "pytorch_lightning")), ("transformers", ("transformers",))]
)
def test_a_missing_package_is_named_with_its_extra(module: str, missing: tuple[str, ...]) -> None:
    done = run_without(missing, f"import optg.integrations.{module}")
    assert done.returncode != 0
    assert f"pip install 'optg[{module}]'" in done.stderr.splitlines()[-1]


def test_the_callback_of_another_trainer_is_refused_with_the_right_import(tmp_path: Path) -> None:
    from optg.integrations import lightning, transformers

    with pytest.raises(AttributeError, match=r"this trainer's Sparsify is in optg\.integrations\.lightning"):
        fit(tmp_path, transformers.Sparsify())
    with pytest.raises(AttributeError, match=r"this trainer's Sparsify is in optg\.integrations\.transformers"):
        train(tmp_path, lightning.Sparsify())


@pytest.mark.parametrize(("trainer", "sparsity"), [("lightning", 0.95), ("transformers", 0.8), ("accelerate", 0.95)])
def test_an_example(trainer: str, sparsity: float, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    example = str(EXAMPLES / f"{trainer}_digits.py")
    monkeypatch.setattr(sys, "argv", [example, "--epochs", "2"])
    runpy.run_path(example, run_name="__main__")
    assert f"sparsity {sparsity:.4f}" in capsys.readouterr().out
