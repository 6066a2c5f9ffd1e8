"""Which weights of real packages' models are pruned: tiny random models, nothing is downloaded."""

import warnings
from collections.abc import Callable
from importlib import import_module
from types import ModuleType

import pytest
import torch
from torch import nn

import optg
from optg.core.accounting import count
from tests.torchvision_import import import_torchvision

transformers = pytest.importorskip("transformers")
SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}


@pytest.fixture(scope="module", autouse=True)
def importable_torchvision() -> None:
    """Make torchvision importable: timm and transformers need it."""
    import_torchvision()


@pytest.fixture(scope="module")
def timm() -> ModuleType:
    return import_module("timm")


def sparsify(model: nn.Module, **options) -> optg.Sparsifier:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    return optg.sparsify(model, optimizer, "gmp", sparsity=0.5, epochs=2, steps_per_epoch=2, **options)


def gpt2(kind: str = "GPT2LMHeadModel") -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=50, n_positions=8, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
    )
    return getattr(transformers, kind)(config)


def gpt2_classifier() -> nn.Module:
    return gpt2("GPT2ForSequenceClassification")


def mixtral() -> nn.Module:
    config = transformers.MixtralConfig(vocab_size=50, num_key_value_heads=1, num_local_experts=3, **SIZES)
    return transformers.MixtralForCausalLM(config)


def bert() -> nn.Module:
    return transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=1000, **SIZES))


def vit() -> nn.Module:
    return transformers.ViTForImageClassification(transformers.ViTConfig(image_size=32, patch_size=4, **SIZES))


@pytest.mark.parametrize(
    ("make", "axes", "dense"),
    [
        (gpt2, {(1, 0, 3), (1, 0, 1)}, {"transformer.wte.weight", "transformer.wpe.weight"}),  # the head is tied to wte
        (gpt2_classifier, {(1, 0, 3), (1, 0, 1), (0, 1, 1)}, {"transformer.wte.weight", "transformer.wpe.weight"}),
        (mixtral, {(0, 1, 1), (1, 2, 3)}, {"model.embed_tokens.weight", "model.layers.0.mlp.gate.weight"}),
        (bert, {(0, 1, 1)}, None),
        (vit, {(0, 1, 1)}, None),
    ],
)
def test_transformers(make: Callable[[], nn.Module], axes, dense):
    model = make()
    with warnings.catch_warnings(action="error"):
        sparsifier = sparsify(model)
    assert {tuple(layer.axes) for layer in sparsifier.layers()} == axes
    left = {name for name, p in model.named_parameters() if p.ndim > 1 and name not in sparsifier.masks}
    assert left == dense or (dense is None and all("embed" in name or "token" in name for name in left))


@pytest.mark.parametrize(
    ("make", "weights"),
    [
        (gpt2, 16 * 48 + 16 * 16 + 2 * 16 * 64 + 50 * 16),
        (mixtral, (16 + 8 + 8 + 16) * 16 + 2 * (64 * 16 + 16 * 32) + 50 * 16),  # a token uses 2 of 3 experts
    ],
)
def test_flops_of_transformers(make: Callable[[], nn.Module], weights: int):
    account = count(make(), {"input_ids": torch.randint(50, (2, 7)), "use_cache": False})
    assert account.flops == account.dense_flops == 7 * weights


@pytest.mark.parametrize("name", ["resnet18", "vit_tiny_patch16_224", "convnext_atto", "mixer_s32_224", "levit_128s"])
def test_timm_models_raise_no_false_alarm(timm, name):
    with warnings.catch_warnings(action="error"):
        sparsify(timm.create_model(name))


@pytest.mark.parametrize("name", ["nf_resnet26", "resnetv2_50x1_bit", "vit_small_r26_s32_224"])
def test_standardized_convolutions_of_timm_stay_dense_with_a_warning(timm, name):
    """Count the zeros in what convolutions use, not in their parameters."""
    model = timm.create_model(name)
    with pytest.warns(UserWarning, match="stay dense: .*weight standardization"):
        sparsifier = sparsify(model)
    standardized = {f"{n}.weight" for n, m in model.named_modules() if "StdConv" in type(m).__name__}
    assert standardized and not standardized & set(sparsifier.masks)
    assert not any(name.endswith(".gain") for name in sparsifier.masks)


def test_lora_adapters_are_left_alone():
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(gpt2(), peft.LoraConfig(target_modules=["c_fc"], fan_in_fan_out=True))
    with pytest.raises(ValueError, match="no prunable weight"):  # the base is frozen
        sparsify(model)
    for name, p in model.named_parameters():
        p.requires_grad_("lora_" in name or "base_layer" in name)
    with warnings.catch_warnings(action="error"):
        assert [name for name in sparsify(model).masks if "lora" in name] == []
    assert len(sparsify(model, include="*lora_*").masks) == 2


@pytest.mark.parametrize("floor", [0.0, 0.01])
def test_a_collapse_of_llamas_attention_is_named_and_a_floor_prevents_it(floor: float):
    """In a short run the gradients of queries and keys are small, and OptG's first cuts remove all of them."""
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=50, **SIZES))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        sparsifier = optg.sparsify(model, optimizer, sparsity=0.95, steps=30, floor=floor)
        for _ in range(30):
            tokens = torch.randint(50, (4, 8))
            optimizer.zero_grad()
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
        sparsifier.finish()
    named = [name for name in sparsifier.masks if any(f"weights of {name} at" in str(w.message) for w in caught)]
    collapsed = [layer.name for layer in sparsifier.layers() if layer.kept == 0]
    assert not collapsed if floor else any("q_proj" in name for name in collapsed) and set(collapsed) <= set(named)
    assert all(layer.kept >= floor * model.get_parameter(layer.name).numel() for layer in sparsifier.layers())
