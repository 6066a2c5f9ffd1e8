"""The prunable parameters of a model as parallel lists, with their gradients and learning rates."""

import math
from functools import cached_property
from operator import is_not
from typing import Any

import torch
from torch import Tensor, nn

from optg.core.prunable import Axes, find_holders, find_links
from optg.core.sharding import find_shards, is_dtensor, local_piece, to_local, with_layout_of
from optg.core.update_rules import UpdateRule, find_rule

Links = tuple[list[dict[str, Any]], list[str], list[Any]]  # dicts of modules, keys in them, and what they held there


class ParameterLists:
    """Names, parameters, values and gradients; entry i of each list belongs to layer i.

    Every tensor in the lists is local: with FSDP2 it is this process's piece of the layer.
    """

    def __init__(
        self,
        parameters: dict[str, nn.Parameter],
        optimizer: Any,  # torch's, or a JointOptimizer
        axes: list[Axes] | None = None,
        model: nn.Module | None = None,
    ) -> None:
        self.names = list(parameters)
        self.axes = axes or [Axes()] * len(parameters)
        self.parameters = list(parameters.values())
        self.model = model
        self.holders = find_holders(model, self.parameters) if model else []  # the module of each, and its name there
        self.links = self._find_links()[0] if model else ([], [], [])
        self.optimizer = optimizer
        self.shapes = [p.shape for p in self.parameters]
        self.size = sum(shape.numel() for shape in self.shapes)
        self.shards = find_shards(parameters)
        self._distributed = any(is_dtensor(p) for p in self.parameters)
        self._values: list[Tensor] = []
        self.devices = [v.device for v in self.values]
        self.state_dtype = torch.promote_types(max((v.dtype for v in self.values), key=lambda d: d.itemsize), torch.float32)
        owner = {p: i for i, group in enumerate(optimizer.param_groups) for p in group["params"]}
        self.groups = [owner[p] for p in self.parameters]  # the parameter group of each layer
        self.active: list[int] | None = None  # with several optimizers: the layers of the one that steps now
        self.active_index = torch.empty(0, dtype=torch.int64)  # the same on the device
        self._lr: dict[tuple[int, torch.device, bool], Tensor] = {}
        initial = [float(group.get("initial_lr", group["lr"])) for group in optimizer.param_groups]
        several = hasattr(optimizer, "optimizers") and len(set(initial)) > 1 and min(initial) > 0
        self._initial_lr = initial if several else None  # rates of different optimizers are not comparable: use lr / lr₀
        self.skipped: Tensor | None = None  # set if a GradScaler may skip this step: True, on the device, if it does

    @property
    def neurons(self) -> list[int]:
        """The number of output neurons (the filters of a convolution) of each layer."""
        return [math.prod(shape[dim] for dim in axes.neurons) for shape, axes in zip(self.shapes, self.axes)]

    def neuron_means(self, layer: int, entries: Tensor) -> Tensor:
        """Return the mean of a tensor shaped like a layer's weight over each output neuron, with the dimensions kept."""
        neurons = self.axes[layer].neurons
        dims = [dim for dim in range(entries.ndim) if dim not in neurons]
        if 0 in neurons or not (self.shards and self.shards.pieces[layer]):
            return entries.mean(dims, keepdim=True) if dims else entries
        sums = self.shards.add(entries.sum(dims, keepdim=True))  # every process holds some inputs of each neuron
        return sums * (self.neurons[layer] / self.shapes[layer].numel())

    @property
    def values(self) -> list[Tensor]:
        """The parameters' values: effective weights between steps, latent weights inside a step."""
        known = self._values
        if not known or any(v.data_ptr() != p.data_ptr() for v, p in zip(known, self.parameters)):
            values = [to_local(p).detach() for p in self.parameters]
            self._values = [] if self._distributed else values
            return values
        return known

    @property
    def grads(self) -> dict[int, Tensor]:
        """Gradients by layer. A layer that took no part in the last backward pass has none."""
        layers = range(len(self.parameters)) if self.active is None else self.active
        grads = {i: grad for i in layers if (grad := self.parameters[i].grad) is not None}
        return {i: to_local(grad) for i, grad in grads.items()} if self._distributed else grads

    def stepping(self, tensors: list[Tensor]) -> list[Tensor]:
        """Return the tensors of the layers that take part in the current step: all, unless there are several optimizers."""
        return tensors if self.active is None else [tensors[i] for i in self.active]

    def learning_rates(self, comparable: bool = True) -> list[Tensor]:
        """Return the learning rate of each layer as a scalar tensor on its device; 0 if this step is skipped.

        Rates of several optimizers are divided by their first ones, unless `comparable` is False.
        """
        rates = {}
        for key in dict.fromkeys(zip(self.groups, self.devices)):
            group, device = key
            lr = self.optimizer.param_groups[group]["lr"]
            lr = lr / self._initial_lr[group] if self._initial_lr and comparable else lr
            if not isinstance(lr, Tensor):
                if (own := (*key, comparable)) not in self._lr:
                    self._lr[own] = torch.zeros((), dtype=self.state_dtype, device=device)
                lr = self._lr[own].fill_(lr)
            lr = lr.reshape(()).to(device)
            rates[key] = lr if self.skipped is None else lr.masked_fill(self.skipped.to(device), 0.0)
        return [rates[key] for key in zip(self.groups, self.devices)]

    def group_option(self, name: str, default: float) -> list[float]:
        """Return an option of each layer's parameter group, such as `weight_decay`."""
        return [self.optimizer.param_groups[group].get(name, default) for group in self.groups]

    @cached_property
    def update_rules(self) -> list[UpdateRule]:
        """How the optimizer moves each layer."""
        optimizers = getattr(self.optimizer, "optimizers", [self.optimizer])
        rules = [find_rule(o, group, self.devices[0]) for o in optimizers for group in o.param_groups]
        return [rules[group] for group in self.groups]

    def gradient_share(self, layer: int, share: float) -> float:
        """Return the factor on gradients of dormant weights: 1 if the optimizer would cancel it (then `Updates` applies it)."""
        return share if share in (0, 1) or self.update_rules[layer].linear else 1.0

    def unless_skipped(self, value: Any, otherwise: Any) -> Any:
        """Return `value`, or a tensor that holds `otherwise` if a GradScaler skips this step."""
        return value if self.skipped is None else torch.where(self.skipped, otherwise, value)

    def zeros_like(self) -> list[Tensor]:
        """Return zeros for every weight, in float32 at least: many small steps add up in them."""
        return [torch.zeros_like(v, dtype=torch.promote_types(v.dtype, torch.float32)) for v in self.values]

    def random(self, seed: int) -> list[Tensor]:
        """Return a uniform random number for every weight, the same on any device and however the layers are split."""
        generator = torch.Generator().manual_seed(seed)
        whole = (torch.rand(shape, generator=generator) for shape in self.shapes)
        return [with_layout_of(p, local_piece(p, number).to(to_local(p).device)) for p, number in zip(self.parameters, whole)]

    def refuse_replaced(self) -> None:
        """Raise if a parameter or its module was replaced since `sparsify`. Called at every step, so it only compares ids."""
        holders, keys, held = self.links
        if self._distributed or not any(map(is_not, map(dict.get, holders, keys), held)):  # FSDP2 exchanges parameters itself
            return
        links, gone = self._find_links()
        for name, (module, key), p in zip(self.names, self.holders, self.parameters):
            if module in gone or module._parameters.get(key) is not p:
                raise RuntimeError(
                    f"{name} is not the Parameter that it was when sparsify was called, so it would stay dense: it was "
                    "replaced, alone or with its module. Replace it before sparsify, or write into it in place"
                )
        self.links = links  # a module was only wrapped, for example by torch.compile

    def _find_links(self) -> tuple[Links, set[nn.Module]]:
        """Return how the model holds its modules and the modules their parameters, and the modules that are no longer in it."""
        assert self.model
        links, gone = find_links(self.model, [module for module, _ in self.holders])
        own = [(module._parameters, key, p) for (module, key), p in zip(self.holders, self.parameters)]
        holders, keys, held = zip(*links, *own)
        return (list(holders), list(keys), list(held)), gone

    def forget_model(self) -> None:
        """Let parameters and modules be replaced from now on."""
        self.model, self.holders, self.links = None, [], ([], [], [])
