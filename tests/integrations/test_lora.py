"""LoRA on a sparse model: the masks bring the zeros back after a merge."""

import re
import runpy
import sys
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.pytorch_utils import Conv1D

import optg

EXAMPLE = Path(__file__).parents[2] / "examples" / "lora_sparse.py"


def test_the_lora_example(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), "--steps", "20"])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    before, merged, masked, tuned = (int(n.replace(",", "")) for n in re.findall(r"([\d,]+) zeros", capsys.readouterr().out))
    weights = 2 * (4 * 64 * 64 + 3 * 64 * 128) + 64 * 64  # two layers of attention and MLP, and the head
    assert before == masked == tuned == -(-weights * 4 // 5)
    assert merged < before / 10  # only the head, which "all-linear" leaves out, keeps its zeros


def sparse_gpt2() -> GPT2LMHeadModel:
    """Return a model that was pruned elsewhere: half of each matrix is 0."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=16, n_embd=8, n_layer=1, n_head=2, n_positions=8))
    for module in model.modules():
        if isinstance(module, Conv1D):
            weight = module.weight.data
            weight[weight.abs() <= weight.abs().median()] = 0.0
    return model


def zeros(model: nn.Module) -> dict[str, int]:
    return {name: int((m.weight == 0).sum()) for name, m in model.named_modules() if isinstance(m, Conv1D)}


def with_trained_adapters(model: GPT2LMHeadModel) -> PeftModel:
    lora = get_peft_model(model, LoraConfig(r=2, target_modules=["c_attn", "c_fc", "c_proj"], fan_in_fan_out=True))
    optimizer = torch.optim.AdamW([p for p in lora.parameters() if p.requires_grad], lr=0.1)
    for _ in range(3):
        words = torch.randint(16, (2, 8))
        optimizer.zero_grad()
        lora(input_ids=words, labels=words).loss.backward()
        optimizer.step()
    return lora


def test_keep_adopts_a_sparse_model_and_restores_its_zeros_after_the_merge() -> None:
    model = sparse_gpt2()
    before = zeros(model)
    sparsifier = optg.sparsify(model, torch.optim.SGD(model.parameters(), lr=0.1), method="keep")
    sparsifier.finish()
    merged = with_trained_adapters(model).merge_and_unload()
    dense = {name: m.weight.clone() for name, m in merged.named_modules() if isinstance(m, Conv1D)}
    assert sum(zeros(merged).values()) == 0
    sparsifier.apply_masks(merged)
    assert zeros(merged) == before
    for name, weight in dense.items():  # kept weights are those of the merged model
        kept = merged.get_submodule(name).weight
        assert torch.equal(kept[kept != 0], weight[kept != 0])


def test_apply_masks_to_a_model_with_adapters_says_to_merge_them_first() -> None:
    model = sparse_gpt2()
    sparsifier = optg.sparsify(model, torch.optim.SGD(model.parameters(), lr=0.1), method="keep")
    sparsifier.finish()
    with pytest.raises(ValueError, match="merge adapters first"):
        sparsifier.apply_masks(with_trained_adapters(model))
