"""optg.deploy.semi_structured: run Linear layers with 2:4 weights on the sparse tensor cores of a GPU.

fast, layers = optg.deploy.semi_structured(model.cuda().bfloat16())
print(layers)                                # {"fc1": "2:4", "head": "dense: its weight is not 2:4", …}

A weight is 2:4 if at most 2 of every 4 neighbours along the input dimension are not 0. Whether it pays depends on the layer's
size and the batch: see benchmarks/semi_structured.py.
"""

import copy
import warnings
from collections import Counter

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from optg.core.layer_kinds import has_computed_weight
from optg.core.prunable import unwrap

CAPABILITY = (8, 0)  # Ampere, the first GPUs with sparse tensor cores
MULTIPLES = {torch.float16: (32, 64), torch.bfloat16: (32, 64)}  # of outputs and inputs; enough for both of torch's backends
TOLERANCE = 0.02  # largest difference from the dense layer, relative to its largest output


def semi_structured(model: nn.Module) -> tuple[nn.Module, dict[str, str]]:
    """Return a copy of the model for inference whose 2:4 Linear layers are semi-structured tensors, and what became of each.

    The model must be on an NVIDIA GPU of compute capability 8.0 or newer, in float16 or bfloat16. The second result says for
    each Linear layer, by name, "2:4" or "dense: " and the reason. Convolutions are not converted: torch has no 2:4 kernels
    for them.
    """
    homes = {p.device for p in model.parameters()}
    if any(device.type != "cuda" for device in homes) or not homes:
        names = ", ".join(sorted(map(str, homes))) or "no device"
        raise ValueError(f"the model is on {names}; 2:4 tensors need an NVIDIA GPU: model.cuda()")
    if weak := [device for device in homes if torch.cuda.get_device_capability(device) < CAPABILITY]:
        raise ValueError(f"{torch.cuda.get_device_name(weak[0])} has no sparse tensor cores; 2:4 needs compute capability 8.0")
    fast = copy.deepcopy(unwrap(model)).eval().requires_grad_(False)
    layers = {}
    for name, (layer, reason) in linear_layers(fast).items():
        if not (reason := reason or convert(layer)):
            avoid_fast_path(fast, layer)
        layers[name] = f"dense: {reason}" if reason else "2:4"
    return fast, layers


def linear_layers(model: nn.Module) -> dict[str, tuple[nn.Linear, str]]:
    """Return the Linear layers by name, each with the reason why it must stay dense; empty if it can be 2:4."""
    attention = {m.out_proj for m in model.modules() if isinstance(m, nn.MultiheadAttention)}
    owners: Counter[Tensor] = Counter(p for module in model.modules() for p in module._parameters.values() if p is not None)
    found = {}
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear):
            reason = "an attention layer reads its weight without calling it" if layer in attention else ""
            if not reason and has_computed_weight(layer):
                reason = "its weight is computed at every call"
            if not reason and owners[layer.weight] > 1:
                reason = "it shares its weight with another layer"
            found[name] = layer, reason or unsuitable(layer.weight)
    return found


def unsuitable(weight: Tensor) -> str:
    """Return why a weight cannot be a semi-structured tensor; empty if it can."""
    if weight.dtype not in MULTIPLES:
        return f"its weight is {str(weight.dtype).removeprefix('torch.')}; 2:4 needs float16 or bfloat16"
    rows, columns = MULTIPLES[weight.dtype]
    if weight.shape[0] % rows or weight.shape[1] % columns:
        shape = "×".join(map(str, weight.shape))
        return f"its weight is {shape}; outputs must be a multiple of {rows}, inputs of {columns}"
    return "" if is_two_four(weight) else "its weight is not 2:4"


def is_two_four(weight: Tensor) -> bool:
    """Return whether at most 2 of every 4 neighbours along the input dimension of a Linear's weight are not 0."""
    return weight.shape[1] % 4 == 0 and bool(((weight.detach().unflatten(1, (-1, 4)) != 0).sum(2) <= 2).all())


def convert(layer: nn.Linear) -> str:
    """Make the layer's weight a semi-structured tensor. Return why this failed; empty if it worked."""
    dense = layer.weight.detach().contiguous()
    x = torch.randn(64, dense.shape[1], generator=torch.Generator().manual_seed(0)).to(dense)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch calls this interface a prototype
            sparse = torch.sparse.to_sparse_semi_structured(dense)
        expected, found = F.linear(x, dense, layer.bias), F.linear(x, sparse, layer.bias)
    except (RuntimeError, NotImplementedError) as error:
        return f"torch cannot convert it: {next(iter(str(error).splitlines()), type(error).__name__)}"
    difference = float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-6))
    if not difference <= TOLERANCE:
        return f"torch's 2:4 product differs by {difference:.1e} from the dense one"
    layer.weight = nn.Parameter(sparse, requires_grad=False)
    return ""


def avoid_fast_path(model: nn.Module, layer: nn.Linear) -> None:
    """Keep a TransformerEncoderLayer from its fused kernel, which reads the weights of its layers as dense ones."""
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoderLayer) and layer in (module.linear1, module.linear2):
            module.activation_relu_or_gelu = 0
