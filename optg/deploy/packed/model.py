"""The module that `optg.load` returns."""

from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from optg.deploy.graph import Graph, check_inputs, execute, freed_after, order_inputs
from optg.deploy.packed.header import About


class PackedModel(nn.Module):
    """A model from a packed file. Its state_dict has the names and values of the model it was made from."""

    def __init__(self, graph: Graph, about: About) -> None:
        super().__init__()
        self.about = about
        self._graph = replace(graph, tensors={name: tensor.to("meta") for name, tensor in graph.tensors.items()})
        self._freed = freed_after(graph)
        values = {
            name: nn.Parameter(tensor, tensor.is_floating_point()) if graph.kinds[name] == "parameter" else tensor
            for name, tensor in graph.tensors.items()
        }
        for known, name in {**{name: name for name in values}, **graph.aliases}.items():
            self._register(known, values[name], graph.kinds[name])
        self.eval()

    def _register(self, name: str, tensor: Tensor, kind: str) -> None:
        """Register a tensor under its dotted name, in nested empty modules."""
        module: nn.Module = self
        *path, key = name.split(".")
        for part in path:
            module = module._modules.setdefault(part, nn.Module())  # type: ignore[assignment]
        if kind == "parameter":
            module._parameters[key] = tensor  # type: ignore[assignment]
            return
        module._buffers[key] = tensor
        if kind == "constant":
            module._non_persistent_buffers_set.add(key)

    @property
    def graph(self) -> Graph:
        """Return the graph with the current values of the tensors."""
        return replace(self._graph, tensors={name: tensor.detach() for name, tensor in self._tensors().items()})

    def _tensors(self) -> dict[str, Tensor]:
        known = {**dict(self.named_parameters(remove_duplicate=False)), **dict(self.named_buffers(remove_duplicate=False))}
        return {name: known[name] for name in self._graph.kinds}

    def forward(self, *inputs: Tensor, **named: Tensor) -> Any:
        inputs = order_inputs(self._graph, inputs, named)
        check_inputs(self._graph, inputs)
        return execute(self._graph, inputs, self._tensors(), freed=self._freed)
