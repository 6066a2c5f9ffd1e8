"""Train LoRA adapters on a sparse language model, merge them, and bring the zeros back. Downloads nothing.

python examples/lora_sparse.py
"""

import argparse

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import optg

WORDS = 64


def batch(stride: int) -> Tensor:
    """Return sentences in which each word is `stride` after the one before it."""
    return (torch.randint(WORDS, (16, 1)) + stride * torch.arange(12)) % WORDS


def train(model: nn.Module, optimizer: torch.optim.Optimizer, stride: int, steps: int) -> None:
    for _ in range(steps):
        words = batch(stride)
        optimizer.zero_grad()
        model(input_ids=words, labels=words).loss.backward()
        optimizer.step()


@torch.no_grad()
def show(when: str, model: nn.Module, stride: int) -> None:
    zeros = sum(int((m.weight == 0).sum()) for m in model.modules() if isinstance(m, nn.Linear))
    words = batch(stride)
    print(f"{when:<24} {zeros:>7,} zeros, loss {model(input_ids=words, labels=words).loss:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--sparsity", type=float, default=0.8)
    options = parser.parse_args()
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, **sizes))

    # 1. A sparse model. For one from elsewhere: sparsifier = optg.sparsify(model, optimizer, method="keep")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    sparsifier = optg.sparsify(model, optimizer, "gmp", sparsity=options.sparsity, steps=options.steps)
    train(model, optimizer, stride=3, steps=options.steps)
    sparsifier.finish()
    show("before adapters:", model, stride=5)

    # 2. Adapters learn a new task. The base is frozen, so its zeros stay; optg leaves adapters alone.
    lora = get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"))
    adapters = [p for p in lora.parameters() if p.requires_grad]
    train(lora, torch.optim.AdamW(adapters, lr=3e-3), stride=5, steps=options.steps)

    # 3. Merging adds B·A to the base weights and makes them dense; the masks remove the same weights again.
    merged = lora.merge_and_unload()
    show("after merge_and_unload:", merged, stride=5)
    sparsifier.apply_masks(merged)
    show("after apply_masks:", merged, stride=5)

    # 4. Most of what the adapters learned was in removed weights and is lost. Fine-tuning with the zeros kept learns it again;
    #    on this toy task the same steps without any adapters end nearly as low.
    merged.requires_grad_(True)  # merge_and_unload leaves the base frozen
    optimizer = torch.optim.AdamW(merged.parameters(), lr=1e-3)
    keeper = optg.sparsify(merged, optimizer, method="keep")
    train(merged, optimizer, stride=5, steps=options.steps // 4)
    keeper.finish()
    show("after fine-tuning:", merged, stride=5)


if __name__ == "__main__":
    main()
