"""Evaluate a model before training: gradients, Hessian products and the all-ones pass.

Nothing about the model changes: parameters, gradients, buffers (batch-norm statistics), mode and random state are restored.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves, tree_map

from optg.core.preserve import preserve_model
from optg.core.prunable import parameters_by_name, unwrap, wrapper_chain
from optg.core.sharding import to_local
from optg.core.weights import SparseWeights

Loss = Callable[[nn.Module, Any], Tensor]


class Probe:
    """A model with a way to evaluate it: `loss(model, batch)` and some batches, if the user gave them to this method."""

    def __init__(self, model: nn.Module, loss: Loss | None, batches: Iterable[Any] | None, method: str = "this method") -> None:
        self.model = model
        self.loss = loss
        self.batches = batches
        self.method = method

    def take(self, count: int) -> tuple[Loss, list[Any]]:
        """Return the loss and the first `count` batches."""
        if self.loss is None or self.batches is None:
            raise ValueError(
                f"{self.method} needs data before training: give sparsify `loss`, a function of the model and a batch such as "
                "lambda model, batch: cross_entropy(model(batch[0]), batch[1]), and `batches`, such as the training loader"
            )
        taken = list(islice(iter(self.batches), count))
        if not taken:
            raise ValueError("`batches` is empty; expected at least one batch")
        return self.loss, taken

    def gradients(self, weights: SparseWeights, count: int) -> list[Tensor]:
        """Return dL/dw, averaged over `count` batches and, with DDP or FSDP2, over ranks."""
        with preserve_model(self.model), torch.enable_grad():
            loss, batches = self.take(count)
            for batch in batches:
                (loss(self.model, batch) / len(batches)).backward()
            return collect(weights.parameters)

    def hessian_gradients(self, weights: SparseWeights, count: int, temperature: float) -> list[Tensor]:
        """Return H·g of the loss at outputs divided by `temperature`: the gradient of g · (a fixed copy of g)."""
        if weights.shards:
            raise ValueError(
                "a second backward pass does not work on weights that FSDP2 has split; use DDP, or prune before fully_shard"
            )
        model, mine = unwrap(self.model), weights.parameters
        # neither fused attention nor compiled code has a second derivative
        eager, math = torch.compiler.set_stance("force_eager"), sdpa_kernel(SDPBackend.MATH)
        with preserve_model(model), torch.enable_grad(), with_temperature(model, temperature), math, eager:
            loss, batches = self.take(count)
            fixed = [torch.zeros_like(p) for p in mine]
            for batch in batches:
                torch._foreach_add_(fixed, differentiate(loss(model, batch) / len(batches), mine))
            fixed = average_over_ranks(fixed, self.model)
            products = [torch.zeros_like(p) for p in mine]
            for batch in batches:
                grads = differentiate(loss(model, batch) / len(batches), mine, create_graph=True)
                flow = torch.stack([(f * g).sum() for f, g in zip(fixed, grads)]).sum()
                if flow.requires_grad:  # False if g does not depend on the weights
                    torch._foreach_add_(products, differentiate(flow, mine))
            return average_over_ranks(products, self.model)

    def synaptic_flow(self, weights: SparseWeights, inputs: "Inputs") -> list[Tensor]:
        """Return (dR/d|w|)·|w|, where R is the sum of the outputs for these inputs with every parameter's absolute value.

        R grows with every layer, so this runs on a copy in float64; with FSDP2, on the model itself in its own dtype.
        """
        model, (args, kwargs) = unwrap(self.model), inputs
        if weights.shards is None:
            model = copy.deepcopy(model).double()
            args, kwargs = tree_map(doubled, (args, kwargs))
        named = parameters_by_name(model)
        mine = [named[name] for name in weights.names]
        with preserve_model(model), absolute(model):
            model.eval()
            with torch.enable_grad(), default_dtype_of(next(model.parameters())):
                outputs = [x.sum() for x in tree_leaves(model(*args, **kwargs)) if isinstance(x, Tensor) and x.requires_grad]
                if not outputs:
                    raise ValueError(MODEL_NOT_CALLED)
                torch.stack(outputs).sum().backward()
            scores = [grad * to_local(p).detach() for grad, p in zip(collect(mine), mine)]
        if not all(s.isfinite().all() for s in scores):
            raise FloatingPointError("the all-ones pass overflows in this model's dtype; convert its parameters to float64")
        return scores

    def ones(self) -> "Inputs":
        """Return the arguments that `loss` calls the model with, cut to one example and filled with ones."""
        seen: list[Inputs] = []

        def look(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            seen.append(tree_map(ones_for, (list(args), kwargs)))
            raise Seen

        with preserve_model(self.model):
            loss, [batch] = self.take(1)
            hook = unwrap(self.model).register_forward_pre_hook(look, prepend=True, with_kwargs=True)
            try:
                with suppress(Seen):
                    loss(unwrap(self.model), batch)
            finally:
                hook.remove()
        if not seen:
            raise ValueError(MODEL_NOT_CALLED)
        return seen[0]


MODEL_NOT_CALLED = (
    "`loss` did not call the model it was given, or the model returned no tensor; expected a call of model(...), not of its "
    "parts or model.forward(...), that returns a tensor, or a tuple, list or dict of tensors"
)
Inputs = tuple[list[Any], dict[str, Any]]


class Seen(Exception):
    """Raised when the model is called: its arguments are known, so evaluating it is not needed."""


def ones_for(x: Any) -> Any:
    """Return one example of ones; keep tokens and other integers as they are."""
    if not isinstance(x, Tensor):
        return x
    first = x[:1] if x.ndim else x
    return torch.ones_like(first) if x.is_floating_point() else first


def doubled(x: Any) -> Any:
    return x.double() if isinstance(x, Tensor) and x.is_floating_point() else x


def differentiate(value: Tensor, parameters: Sequence[Tensor], create_graph: bool = False) -> list[Tensor]:
    return list(torch.autograd.grad(value, parameters, create_graph=create_graph, allow_unused=True, materialize_grads=True))


def collect(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """Return the gradients that the backward pass left in the parameters; 0 where it left none."""
    return [torch.zeros_like(to_local(p)) if p.grad is None else to_local(p.grad) for p in parameters]


def average_over_ranks(tensors: list[Tensor], model: nn.Module) -> list[Tensor]:
    """Average over ranks, as DDP does, tensors that did not pass through its backward hooks."""
    for wrapper in wrapper_chain(model):
        if isinstance(wrapper, nn.parallel.DistributedDataParallel):
            for tensor in tensors:
                dist.all_reduce(tensor, group=wrapper.process_group)
                tensor /= dist.get_world_size(wrapper.process_group)
    return tensors


@contextmanager
def default_dtype_of(parameter: Tensor) -> Iterator[None]:
    """Make the parameter's dtype the default for tensors that the forward pass creates."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(parameter.dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def absolute(model: nn.Module) -> Iterator[None]:
    """Replace every parameter by its absolute value inside the block."""
    values = [to_local(p).detach() for p in model.parameters()]
    saved = [v.clone() for v in values]
    torch._foreach_abs_(values)
    try:
        yield
    finally:
        torch._foreach_copy_(values, saved)


@contextmanager
def with_temperature(model: nn.Module, temperature: float) -> Iterator[None]:
    """Divide the model's outputs by a temperature inside the block."""
    called = []

    def soft(x: Any) -> Any:
        if not isinstance(x, Tensor) or not x.is_floating_point():
            return x
        called.append(True)
        return x / temperature

    def divide(module: nn.Module, args: Any, output: Any) -> Any:
        return tree_map(soft, output)

    hook = model.register_forward_hook(divide)
    try:
        yield
        if not called:
            raise ValueError(MODEL_NOT_CALLED)
    finally:
        hook.remove()
