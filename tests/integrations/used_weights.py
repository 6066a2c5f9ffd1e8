"""Watch which weights a model really uses, whatever its parameters say."""

from itertools import chain
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

F = nn.functional


class UsedWeights(TorchFunctionMode):
    """Records the weights that linear, convolution, attention and recurrent functions are called with.

    zero: where the given parameters were 0 when they were used, by name.
    computed: the shapes of weights that are no parameter of the model, because a layer computes them at every call.
    """

    FUNCTIONS: ClassVar = {
        F.linear,
        *(F.conv1d, F.conv2d, F.conv3d, F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d),
        *(torch.conv1d, torch.conv2d, torch.conv3d, torch.conv_transpose2d),
    }
    OTHERS: ClassVar = {
        *(F.multi_head_attention_forward, torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu),
        *(torch.lstm_cell, torch.gru_cell),
        torch.addmm,  # transformers' Conv1D
    }

    def __init__(self, parameters: dict[str, Tensor], model: nn.Module | None = None) -> None:
        super().__init__()
        self.names = {p.data_ptr(): name for name, p in parameters.items()}
        self.known = {p.data_ptr() for p in model.parameters()} if model else set()
        self.zero: dict[str, Tensor] = {}
        self.computed: list[tuple[int, ...]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in self.FUNCTIONS | self.OTHERS:
            lists = [value if isinstance(value, list | tuple) else [value] for value in (*args, *kwargs.values())]
            for t in chain.from_iterable(lists):
                if isinstance(t, Tensor) and t.data_ptr() in self.names:
                    self.zero[self.names[t.data_ptr()]] = t == 0
        if func in self.FUNCTIONS:
            weight = kwargs["weight"] if "weight" in kwargs else args[1]
            if weight.data_ptr() not in self.known:
                self.computed.append(tuple(weight.shape))
        return func(*args, **kwargs)
