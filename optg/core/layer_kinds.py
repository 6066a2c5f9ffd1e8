"""The kinds of layers whose weights are prunable by default, and the meaning of the dimensions of their weights.

Classes of other packages are recognised by their name or shape, so that none of these packages has to be imported.
"""

from typing import NamedTuple

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.utils.parametrize import is_parametrized

PRUNABLE = (nn.Linear, nn.Bilinear, _ConvNd, nn.MultiheadAttention)
RECURRENT = (nn.RNNBase, nn.RNNCellBase)
EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
NORMS = (nn.LayerNorm, nn.RMSNorm)  # other norms have one dimension
FUSED = {"qkv", "Wqkv", "c_attn", "in_proj"}  # attributes that hold query, key and value as one layer
STANDARDIZED = {  # convolutions that standardize their weight at every call: timm's, and BiT's in transformers
    "StdConv2d", "StdConv2dSame", "ScaledStdConv2d", "ScaledStdConv2dSame", "WeightStandardizedConv2d",
}  # fmt: skip


class Axes(NamedTuple):
    """The dimensions of a weight that run over its outputs and inputs, and the number of equal parts stacked in it.

    Parts are stacked along the output dimension (query, key and value of an attention layer, the gates of an LSTM), or along
    a first dimension that is neither output nor input (experts).
    """

    output: int = 0
    input: int = 1
    parts: int = 1

    @property
    def stacked(self) -> int:
        """The dimension along which the parts are stacked."""
        return self.output if 0 in (self.output, self.input) else 0

    @property
    def neurons(self) -> list[int]:
        """The dimensions that tell output neurons (the filters of a convolution) apart."""
        return sorted({self.stacked, self.output})


class Owner(NamedTuple):
    """A module that holds a parameter. A shared parameter has several."""

    parameter: str  # the parameter's name
    name: str  # the module's name
    module: nn.Module

    @property
    def key(self) -> str:
        """The parameter's name within the module."""
        return self.parameter.rpartition(".")[2]


REGISTERED: dict[type[nn.Module], Axes] = {}


def prunable(cls: type[nn.Module], output: int = 0, input: int = 1) -> type[nn.Module]:
    """Make the weights of a module class prunable by default: its own parameters of two or more dimensions, without biases.

    Args:
        cls: the class; its subclasses are included.
        output, input: the dimensions of the weights that run over outputs and inputs. A Linear has (0, 1).

    Returns the class, so that this can be used as a decorator.
    """
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        raise TypeError(f"{cls!r} is not a module class; expected a subclass of torch.nn.Module")
    if output == input or min(output, input) < 0:
        raise ValueError(f"output is {output} and input is {input}; expected two different dimensions, counted from 0")
    REGISTERED[cls] = Axes(output, input)
    return cls


def is_layer(module: nn.Module) -> bool:
    """Return whether weights of this module are prunable by default; modules with experts aside."""
    return (
        isinstance(module, (*PRUNABLE, *RECURRENT))
        or registered_axes(module) is not None
        or is_input_first(module)
        or is_linear_like(module)
    )


def default_axes(owner: Owner, p: Tensor) -> Axes | None:
    """Return the axes of a parameter of at least two dimensions; None if it is not prunable by default."""
    module = owner.module
    if owner.key == "gain":
        return None
    if (registered := registered_axes(module)) is not None:
        return registered if p.ndim > max(registered.output, registered.input) else None
    if isinstance(module, _ConvTransposeNd):
        return Axes(output=1, input=0)
    if is_input_first(module):
        return with_fused_parts(Axes(output=1, input=0), owner, p)
    if isinstance(module, nn.MultiheadAttention):
        return Axes(parts=3 if owner.key == "in_proj_weight" else 1)
    if isinstance(module, RECURRENT):
        return Axes(parts=1 if owner.key.startswith("weight_hr") else gates(module))
    if isinstance(module, PRUNABLE) or (is_linear_like(module) and owner.key == "weight"):
        return with_fused_parts(Axes(), owner, p)
    if is_expert_stack(owner, p):
        transposed = getattr(module, "is_transposed", False)  # what transformers calls input-first experts
        return Axes(output=2, input=1, parts=len(p)) if transposed else Axes(output=1, input=2, parts=len(p))
    return None


def registered_axes(module: nn.Module) -> Axes | None:
    """Return what `prunable` was told about the module's class, or about its nearest parent class."""
    return next((REGISTERED[cls] for cls in type(module).__mro__ if cls in REGISTERED), None)


def with_fused_parts(axes: Axes, owner: Owner, p: Tensor) -> Axes:
    """Return axes with three parts if the layer's name says query, key and value, and its output is three times its input.

    Most models stack the three as blocks. The few that interleave them by heads (TinyViT, DeBERTa) get thirds of the heads.
    """
    fused = owner.name.rpartition(".")[2] in FUSED and p.shape[axes.output] == 3 * p.shape[axes.input]
    return axes._replace(parts=3) if fused else axes


def gates(module: nn.Module) -> int:
    """Return the number of gates whose weights a recurrent layer stacks."""
    if isinstance(module, (nn.LSTM, nn.LSTMCell)):
        return 4
    return 3 if isinstance(module, (nn.GRU, nn.GRUCell)) else 1


def is_input_first(module: nn.Module) -> bool:
    """Return whether this is the Conv1D of transformers: a linear layer whose weight has the shape (inputs, outputs)."""
    return hasattr(module, "nf") and any(cls.__name__ == "Conv1D" for cls in type(module).__mro__)


def is_linear_like(module: nn.Module) -> bool:
    """Return whether the module has a weight of the shape (out_features, in_features) or (out_channels, in_channels)."""
    for outputs, inputs in (("out_features", "in_features"), ("out_channels", "in_channels")):
        if hasattr(module, outputs) and hasattr(module, inputs):
            weight = getattr(module, "weight", None)
            if isinstance(weight, Tensor) and tuple(weight.shape) == (getattr(module, outputs), getattr(module, inputs)):
                return True
    return False


def is_expert_stack(owner: Owner, p: Tensor) -> bool:
    """Return whether this is a stack of expert weights: three dimensions, and "expert" in the name of its module or its own."""
    names = type(owner.module).__name__, owner.name.rpartition(".")[2], owner.key
    return p.ndim == 3 and min(p.shape) > 1 and any("expert" in name.lower() for name in names)


def has_computed_weight(layer: nn.Module) -> bool:
    """Return whether the layer computes its weight at every call: by a parametrization, weight_norm, or standardization."""
    old_weight_norm = any(key.startswith("weight") and key.endswith("_g") for key in layer._parameters)
    return is_parametrized(layer) or old_weight_norm or any(cls.__name__ in STANDARDIZED for cls in type(layer).__mro__)


def is_bias(key: str) -> bool:
    return key.startswith("bias") or key.endswith("bias")  # attention has biases of 3 dimensions, experts of 2
