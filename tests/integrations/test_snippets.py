"""The snippets of the README and docs/integrations.md run as they are printed."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch
import peft
import pytest
import torch
import transformers

import optg
from tests.integrations.test_lightning import Loader, Net
from tests.integrations.test_transformers import sentences, tiny_bert
from tests.integrations.zeros import expected_zeros, zeros

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "integrations.md").read_text()
SNIPPETS = dict(re.findall(r"^## (\w+)\n.*?```python\n(.*?)```", PAGE, flags=re.MULTILINE | re.DOTALL))
README = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)


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


def run(snippet: str, names: dict[str, Any]) -> None:
    """Run a snippet, and the loop where it says "...  #"."""
    start, _, end = snippet.partition("...  #")
    exec(start, names)
    if end:
        loop(SimpleNamespace(**names))
        exec(end.partition("\n")[2], names)


@pytest.mark.parametrize("trainer", ["Lightning", "transformers", "accelerate"])
def test_snippet(trainer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    lines = SNIPPETS[trainer].strip().splitlines()
    assert len(lines) <= 5
    names = names_for(trainer, tmp_path)
    run(SNIPPETS[trainer], names)
    assert zeros(names["model"]) == expected_zeros(names["model"], 0.9)


def test_the_snippets_of_the_readme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    first, callbacks, accelerate = README

    # your own loop
    data = [(batch, (batch.sum(1, keepdim=True) > 0).float()) for batch in Loader()]
    loss = torch.nn.BCEWithLogitsLoss()
    names: dict[str, Any] = {"torch": torch, "model": Net().layers, "loader": data, "loss_function": loss}
    exec(first, names)
    assert zeros(names["model"]) == expected_zeros(names["model"], 0.95)

    # one import, and one line for each trainer
    imported, _, lightning_line, transformers_line = callbacks.splitlines()
    package = imported.partition("from optg.integrations.lightning import Sparsify  # or ")[2]
    assert package == "from optg.integrations.transformers"
    names = names_for("Lightning", tmp_path) | {"pl": lightning.pytorch}
    exec(f"{imported}\n{lightning_line}\ntrainer.fit(model, loader)", names)
    assert zeros(names["model"]) == expected_zeros(names["model"], 0.9)
    names = names_for("transformers", tmp_path) | {"Trainer": transformers.Trainer}
    exec(f"{package} import Sparsify\n{transformers_line}\ntrainer.train()", names)
    assert zeros(names["model"]) == expected_zeros(names["model"], 0.9)

    names = names_for("accelerate", tmp_path)
    run(accelerate, names)
    assert zeros(names["model"]) == expected_zeros(names["model"], 0.9)


def test_the_lora_snippet() -> None:
    model = tiny_bert()
    optimizer = torch.optim.AdamW(model.parameters())
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.weight.data[::2] = 0.0
    before = zeros(model)
    names: dict[str, Any] = {"optg": optg, "peft": peft, "model": model, "optimizer": optimizer}
    start, _, end = SNIPPETS["LoRA"].partition("...  #")
    exec(start, names)
    for name, p in names["lora"].named_parameters():
        if "lora_B" in name:
            torch.nn.init.ones_(p)
    exec(end.partition("\n")[2], names)
    assert zeros(names["merged"]) == before
