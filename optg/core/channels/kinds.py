"""Where the channels of each kind of layer lie in its tensors.

A channel of a layer's input or output owns slices of the layer's parameters and buffers. Each class here lists these slices
for one kind of layer, and corrects the layer's attributes after some of them were removed.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd

from optg.core.layer_kinds import is_input_first

Port = Literal["input", "output"]


@dataclass(frozen=True)
class Slot:
    """The slices of one tensor that belong to the channels of a layer's input or output."""

    tensor: Tensor
    dim: int
    index: Tensor  # row i lists the positions along `dim` that channel i owns
    source: bool = False  # must be 0 for the channel to be 0?


def slot(tensor: Tensor | None, dim: int, source: bool, per_channel: int = 1) -> Iterator[Slot]:
    """Yield the slot of a tensor in which every channel owns this many neighbours; nothing if there is no tensor."""
    if tensor is not None:
        yield Slot(tensor, dim, torch.arange(tensor.shape[dim]).view(-1, per_channel), source)


def dense_slots(layer: Any, port: Port, output: int) -> Iterator[Slot]:
    """Yield the slots of a layer whose weight has outputs and inputs as its first two dimensions, in either order."""
    if port == "input":
        yield from slot(layer.weight, 1 - output, False)
    else:
        yield from slot(layer.weight, output, True)
        yield from slot(layer.bias, 0, True)


def tied(tensor: Tensor | None, channels: int, groups: int) -> Iterator[Slot]:
    """Yield the slot of a tensor whose first dimension is cut into equal groups: a channel owns the whole of its group."""
    if tensor is not None:
        index = torch.arange(len(tensor)).view(groups, -1)
        yield Slot(tensor, 0, index.repeat_interleave(channels // groups, 0), True)


class LinearKind:
    @staticmethod
    def matches(module: Any) -> bool:
        return isinstance(module, nn.Linear) and "weight" in module._parameters

    @staticmethod
    def slots(layer: Any, port: Port) -> Iterator[Slot]:
        return dense_slots(layer, port, 0)

    @staticmethod
    def resize(layer: Any) -> None:
        layer.out_features, layer.in_features = layer.weight.shape


class InputFirstLinearKind:
    """The Conv1D of transformers."""

    matches = staticmethod(is_input_first)

    @staticmethod
    def slots(layer: Any, port: Port) -> Iterator[Slot]:
        return dense_slots(layer, port, 1)

    @staticmethod
    def resize(layer: Any) -> None:
        layer.nx, layer.nf = layer.weight.shape


class ConvolutionKind:
    @staticmethod
    def matches(module: Any) -> bool:
        return isinstance(module, _ConvNd) and module.groups == 1 and "weight" in module._parameters

    @staticmethod
    def slots(layer: Any, port: Port) -> Iterator[Slot]:
        return dense_slots(layer, port, int(layer.transposed))

    @staticmethod
    def resize(layer: Any) -> None:
        first, second = layer.weight.shape[:2]
        layer.out_channels, layer.in_channels = (second, first) if layer.transposed else (first, second)


class GroupedConvolutionKind:
    """A convolution with groups, such as a depthwise one. All inputs and outputs of one group go together."""

    @staticmethod
    def matches(module: Any) -> bool:
        return isinstance(module, _ConvNd) and module.groups > 1 and "weight" in module._parameters

    @staticmethod
    def slots(layer: Any, port: Port) -> Iterator[Slot]:
        channels = layer.in_channels if port == "input" else layer.out_channels
        yield from tied(layer.weight, channels, layer.groups)
        yield from tied(layer.bias, channels, layer.groups)

    @staticmethod
    def resize(layer: Any) -> None:
        inputs, outputs = layer.in_channels // layer.groups, layer.out_channels // layer.groups
        layer.groups = len(layer.weight) // (inputs if layer.transposed else outputs)
        layer.in_channels, layer.out_channels = layer.groups * inputs, layer.groups * outputs


class BatchNormKind:
    """Batch norms and instance norms."""

    @staticmethod
    def matches(module: Any) -> bool:
        return isinstance(module, _NormBase)

    @staticmethod
    def slots(layer: Any, port: Port) -> Iterator[Slot]:
        for parameter in (layer.weight, layer.bias):
            yield from slot(parameter, 0, True)
        for buffer in (layer.running_mean, layer.running_var):
            yield from slot(buffer, 0, False)

    @staticmethod
    def resize(layer: Any) -> None:
        layer.num_features = len(next(t for t in (layer.weight, layer.running_mean) if t is not None))


class GroupNormKind:
    """All channels that a group norm averages go together."""

    @staticmethod
    def matches(module: Any) -> bool:
        return isinstance(module, nn.GroupNorm)

    @staticmethod
    def slots(layer: Any, port: Port) -> Iterator[Slot]:
        yield from tied(layer.weight, layer.num_channels, layer.num_groups)
        yield from tied(layer.bias, layer.num_channels, layer.num_groups)

    @staticmethod
    def resize(layer: Any) -> None:
        layer.num_groups = len(layer.weight) // (layer.num_channels // layer.num_groups)
        layer.num_channels = len(layer.weight)


class PReLUKind:
    """The slopes have no effect on 0. One slope for all channels belongs to none."""

    @staticmethod
    def matches(module: Any) -> bool:
        return isinstance(module, nn.PReLU) and module.num_parameters > 1

    @staticmethod
    def slots(layer: Any, port: Port) -> Iterator[Slot]:
        yield from slot(layer.weight, 0, False)

    @staticmethod
    def resize(layer: Any) -> None:
        layer.num_parameters = len(layer.weight)


class EmbeddingKind:
    @staticmethod
    def matches(module: Any) -> bool:
        return isinstance(module, nn.Embedding)

    @staticmethod
    def slots(layer: Any, port: Port) -> Iterator[Slot]:
        yield from slot(layer.weight, 1, True)

    @staticmethod
    def resize(layer: Any) -> None:
        layer.embedding_dim = layer.weight.shape[1]


WEIGHTED = (LinearKind, InputFirstLinearKind, ConvolutionKind, GroupedConvolutionKind)  # groups are searched from these
KINDS = (*WEIGHTED, BatchNormKind, GroupNormKind, PReLUKind, EmbeddingKind)


def kind_of(module: Any) -> Any:
    """Return the kind of a layer; None if its channels cannot be removed."""
    return next((kind for kind in KINDS if kind.matches(module)), None)
