"""The snippets of docs/integrations.md run as they are printed."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import optg
from tests.integrations.test_lightning import Loader, Net
from tests.integrations.test_transformers import sentences, tiny_bert
from tests.integrations.zeros import expected_zeros, zeros

PAGE = Path(__file__).parents[2] / "docs" / "integrations.md"
SNIPPETS = dict(re.findall(r"^## (\w+)\n```python\n(.*?)```", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL))


def names_for(trainer: str, folder: Path) -> dict[str, Any]:
    """Return what a snippet takes for granted."""
    if trainer == "transformers":
        from transformers import TrainingArguments

        arguments = TrainingArguments(str(folder), use_cpu=True, report_to="none", save_strategy="no")
        return {"model": tiny_bert(), "arguments": arguments, "dataset": sentences()}
    if trainer == "Lightning":
        return {"model": Net(), "loader": Loader()}
    from accelerate import Accelerator

    model = Net().layers
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return {
        "optg": optg, "model": model, "optimizer": optimizer, "loader": torch.utils.data.DataLoader(torch.randn(32, 8), 4),
        "epochs": 2, "accelerator": Accelerator(cpu=True),
    }  # fmt: skip


def loop(names: SimpleNamespace) -> None:
    """The loop that the accelerate snippet leaves out."""
    for _ in range(names.epochs):
        for batch in names.loader:
            names.optimizer.zero_grad()
            names.accelerator.backward((names.model(batch).squeeze(1) - batch.sum(1)).square().mean())
            names.optimizer.step()


@pytest.mark.parametrize("trainer", ["Lightning", "transformers", "accelerate"])
def test_snippet(trainer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    lines = SNIPPETS[trainer].strip().splitlines()
    assert len(lines) <= 5
    names = names_for(trainer, tmp_path)
    start, _, end = SNIPPETS[trainer].partition("...  #")
    exec(start, names)
    if end:
        loop(SimpleNamespace(**names))
        exec(end.partition("\n")[2], names)
    assert zeros(names["model"]) == expected_zeros(names["model"], 0.9)
