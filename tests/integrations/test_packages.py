"""Each integration needs its own package only, and says which."""

import runpy
import sys
from pathlib import Path

import pytest

from tests.architecture.blocked import run_without

EXAMPLE = Path(__file__).parents[2] / "examples" / "lightning_digits.py"


@pytest.mark.parametrize(
    ("module", "missing"), [("lightning", ("lightning", "pytorch_lightning")), ("transformers", ("transformers",))]
)
def test_a_missing_package_is_named_with_its_extra(module: str, missing: tuple[str, ...]) -> None:
    done = run_without(missing, f"import optg.integrations.{module}")
    assert done.returncode != 0
    assert f"pip install 'optg[{module}]'" in done.stderr.splitlines()[-1]


def test_the_lightning_example(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), "--epochs", "4"])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    assert "sparsity 0.9500" in capsys.readouterr().out
