"""Attaches a method to a model and its optimizer: the order of one step, and everything a user asks about the sparse model.

The model is untouched. All work is done in the optimizer's own step hooks:

    pre-hook     parameters <- latent; method.after_backward routes the gradients
    post-hook    latent <- parameters; clock += 1; method.after_update may change the mask; parameters <- effective
"""

import warnings
from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from typing import Any, NoReturn
from weakref import WeakSet

import torch
from rich.table import Table
from torch import Tensor, nn

from optg.core.clock import Clock
from optg.core.probe import Loss, Probe
from optg.core.prunable import Pattern, find_prunable, optimizer_parameters, parameters_by_name
from optg.core.ranking import zeros_at
from optg.core.sharding import distribute_like, find_shards, local_piece, norm, to_local
from optg.core.weights import SparseWeights, blank
from optg.methods import METHODS, Method
from optg.naming import nearest


def sparsify(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    method: str | Method = "optg",
    *,
    sparsity: float,
    epochs: int,
    steps_per_epoch: int,
    include: Pattern | Iterable[Pattern] | None = None,
    exclude: Pattern | Iterable[Pattern] = (),
    loss: Loss | None = None,
    batches: Iterable[Any] | None = None,
) -> "Sparsifier":
    """Make `model` sparse while `optimizer` trains it. The training loop stays as it is.

    Args:
        method: a name out of `optg.methods.METHODS`, or an instance of a method with options of its own.
        sparsity: the share of weights to remove, 0 ≤ sparsity < 1; exactly ⌈sparsity · N⌉ of N weights will be 0.
        epochs, steps_per_epoch: how long training will be; `steps_per_epoch` counts calls of `optimizer.step()`.
        include: only these weights, given as module classes or shell patterns for names ("encoder.*"). By default all
            weights of linear, convolution and attention layers that are trained.
        exclude: not these, given likewise.
        loss, batches: for methods that prune before training: the loss as a function of the model and a batch, and an
            iterable of batches, such as the training loader; only the first ones are taken.
    """
    probe = Probe(model, loss, batches)
    return Sparsifier(model, optimizer, method, sparsity, Clock(epochs, steps_per_epoch), include, exclude, probe)


class Sparsifier:
    """A method at work on a model. Made by `sparsify`; kept alive by the optimizer's hooks."""

    @torch.no_grad()
    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        method: str | Method,
        sparsity: float,
        clock: Clock,
        include: Pattern | Iterable[Pattern] | None,
        exclude: Pattern | Iterable[Pattern],
        probe: Probe,
    ) -> None:
        if isinstance(sparsity, str) or not 0 <= sparsity < 1:
            raise ValueError(f"sparsity is {sparsity!r}; expected the share of weights to remove, at least 0 and below 1")
        self.name, self.method = resolve(method)
        refuse_optimizer(optimizer, self.method)
        parameters = find_prunable(model, None if include is None else as_tuple(include), as_tuple(exclude))
        refuse_parameters(parameters, optimizer)
        self.clock = clock
        self.optimizer = optimizer
        self.weights = SparseWeights(parameters, optimizer, float(sparsity))
        if self.weights.shards and not self.method.shardable:
            raise ValueError(f"{self.name} does not work on weights that FSDP2 has split; use DDP, or prune before fully_shard")
        given = [v.clone() for v in self.weights.values]
        self.method.prepare(self.weights, clock, probe)
        self.method.set_time(clock)
        if self.method.keeps_pruned:
            self.weights.latent = [v.clone() for v in self.weights.values]
        if type(self.method).effective is not Method.effective:
            self.weights.reshape, self.weights.soft = self.method.effective, self.method.soft
        self.weights.show_effective()
        self._given = None if all(map(torch.equal, given, self.weights.values)) else (given, self._digest())
        self._collapsed: set[str] = set()
        self._warn_of_collapse()
        self._lr: dict[tuple[int, torch.device], Tensor] = {}
        self._open = False  # is a step under way, the parameters holding latent weights?
        self._warned = False
        self._hooks = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]
        ATTACHED.add(optimizer)

    # ---- one step

    @torch.compiler.disable
    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any]:
        if self.method.when == "never":
            return args, kwargs
        with torch.no_grad():
            self._close()
            self.weights.check()
            self._given = None
            if closure := closure_of(args, kwargs):
                with torch.enable_grad():
                    loss = closure()  # on effective weights
            self._open = True
            self.weights.skipped = unscale(optimizer)
            self.weights.show_latent()
            self.method.after_backward(self.weights, self.clock, self._learning_rates())
        return (args[:1], {**kwargs, "closure": handing_out(loss, optimizer)}) if closure else (args, kwargs)

    @torch.compiler.disable
    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        if self.method.when == "never":
            if not capturing:
                self._count()
            return
        with torch.no_grad():
            if self.method.freezes_dormant:
                self.weights.show_latent()  # removed weights take no part in the step
            if capturing:
                self.weights.settle()  # the rest of a step is the host's: `advance`, after each replay
            else:
                self._tick()
            self._open = False

    def _tick(self) -> None:
        """The host's part of a step: time moves, and perhaps the mask. The parameters hold latent weights, then effective."""
        self._count()
        if self.clock.step <= self.clock.total and self.method.due(self.clock):
            if self.weights.latent is None:
                self.weights.show_effective()  # momentum may have moved removed weights: they are 0 at a cut
            self.method.after_update(self.weights, self.clock)
        if self.clock.at_epoch_start or self.clock.step == self.clock.total:
            self._warn_of_collapse()
        self.weights.settle()

    def _count(self) -> None:
        """One more step, of those that were announced or not."""
        self.clock.step += 1
        self.method.set_time(self.clock)
        if self.clock.step > self.clock.total and not self._warned:
            self._warned = True
            warnings.warn(
                f"optimizer step {self.clock.step}, but {self._announced()}: the mask stays as it is from here on",
                stacklevel=6,
            )

    def _warn_of_collapse(self) -> None:
        """Once for each layer that has lost every weight: nothing passes through it any more."""
        self.weights.check()
        zeros = self.weights.counts[:, 0].tolist()
        for name, shape, count in zip(self.weights.names, self.weights.shapes, zeros):
            if count == shape.numel() and name not in self._collapsed:
                self._collapsed.add(name)
                warnings.warn(
                    f"layer collapse: {self.name} has removed all {count} weights of {name} at step {self.clock.step}",
                    stacklevel=5,
                )

    def _close(self) -> None:
        """A step that was interrupted between the hooks left latent weights in the parameters: make them effective again."""
        if self._open:
            self.weights.show_effective()
            self._open = False

    def _learning_rates(self) -> list[Tensor]:
        """Of each weight, that of its parameter group, as a 0-dim tensor on its device; 0 in a step that is skipped."""
        weights, rates = self.weights, {}
        for key in dict.fromkeys(zip(weights.groups, weights.devices)):
            group, device = key
            lr = self.optimizer.param_groups[group]["lr"]
            if not isinstance(lr, Tensor):
                if key not in self._lr:
                    self._lr[key] = torch.zeros((), dtype=weights.state_dtype, device=device)
                lr = self._lr[key].fill_(lr)
            lr = lr.reshape(()).to(device)
            rates[key] = lr if weights.skipped is None else lr.masked_fill(weights.skipped.to(device), 0.0)
        return [rates[key] for key in zip(weights.groups, weights.devices)]

    @torch.no_grad()
    def advance(self) -> None:
        """Count a step that the hooks have not seen: one replayed from a CUDA graph, or one that a GradScaler skipped."""
        self._close()
        self.weights.check()
        if self.method.due(Clock(self.clock.epochs, self.clock.steps_per_epoch, self.clock.step + 1)):
            self.weights.show_latent()
            self._tick()
        else:
            self._count()

    @property
    def capturable(self) -> bool:
        """May the next step be captured in a CUDA graph or replayed from one? Else take it eagerly."""
        return self.method.capturable(self.clock)

    @torch.no_grad()
    def reload(self) -> None:
        """Take the parameters as they are now, removed weights too, for the latent ones: someone else has written them."""
        self._open = False
        self.weights.store_latent()
        self.weights.show_effective()

    # ---- what a user asks

    @property
    def sparsity(self) -> float:
        """The share of weights that the masks remove now."""
        return self.weights.sparsity

    @property
    @torch.no_grad()
    def masks(self) -> dict[str, Tensor]:
        """The mask of each layer, True where a weight is kept, by the layer's name in the bare model. Not a copy."""
        self._close()
        self.weights.check()
        return self._by_name(self.weights.masks)

    def summary(self) -> Table:
        """What each layer keeps, and what the last cut took and gave back: `rich.print(sparsifier.summary())`."""
        weights = self.weights
        table = Table(title=f"{self.name}, step {self.clock.step} of {self.clock.total}", title_justify="left")
        table.add_column("layer", overflow="fold")
        for column in ("shape", "weights", "kept", "density", "removed", "revived"):
            table.add_column(column, justify="right")

        def row(name: str, shape: str, size: int, zeros: int, removed: int, revived: int, **style: Any) -> None:
            kept = size - zeros
            table.add_row(name, shape, f"{size:,}", f"{kept:,}", f"{kept / size:.2%}", f"{removed:,}", f"{revived:,}", **style)

        for name, shape, counts in zip(weights.names, weights.shapes, weights.counts.tolist()):
            row(name, "×".join(map(str, shape)), shape.numel(), *counts)
        table.add_section()
        row("all", "", weights.size, *weights.counts.sum(0).tolist(), style="bold")
        return table

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Like `torch.nn.utils.clip_grad_norm_` over the optimizer's parameters, with the norm of what they will receive.

        The gradients are dense, and most of their norm is of weights that are not there: at 98 % about 7 times the rest.
        With GSM, whose weights are all there, it is the norm of all gradients.
        """
        self._close()
        masks, share = dict(zip(self.weights.parameters, self.weights.masks)), self.method.dormant_gradient
        moved = {p: to_local(p.grad) for p in optimizer_parameters(self.optimizer) if p.grad is not None}
        norms = []
        for p, grad in moved.items():
            received = torch.where(masks[p], grad, grad * share if share else 0.0) if p in masks else grad
            norms.append(
                torch.linalg.vector_norm(received, norm_type, dtype=self.weights.state_dtype).to(self.weights.devices[0])
            )
        if not norms:
            return torch.zeros(())
        total = norm(torch.stack(norms), norm_type, find_shards({str(i): p for i, p in enumerate(moved)}))
        scale = (max_norm / (total + 1e-6)).clamp(max=1.0)
        for grad in moved.values():
            grad.mul_(scale.to(grad.device))
        return total

    @torch.no_grad()
    def apply_masks(self, model: nn.Module) -> None:
        """Remove in another model of the same layers (an average of weights: EMA, SWA) what is removed here."""
        others = parameters_by_name(model)
        for name, mask in self.masks.items():
            if name not in others or others[name].shape != mask.shape:
                raise ValueError(f"the other model has no {name} of shape {tuple(mask.shape)}; expected a copy of this model")
        for name, mask in self.masks.items():
            values = to_local(others[name])
            blank(local_piece(others[name], mask).to(values.device), values)

    # ---- state

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain values. Save it with the model's and the optimizer's to resume bit for bit."""
        self._close()
        self.weights.check()
        return self._state()

    def _state(self) -> dict[str, Any]:
        tensors = {"masks": self.weights.masks, **self.method.state}
        if self.weights.latent is not None:
            tensors["latent"] = self.weights.latent
        return {
            **self._identity(),
            "step": self.clock.step,
            "counts": self.weights.counts.tolist(),
            "tensors": {kind: self._by_name(values) for kind, values in tensors.items()},
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state, whose model may have been wrapped or distributed otherwise.

        The model's own state may be loaded before `sparsify`, after it, or after this.
        """
        self._close()
        current = self._state()
        refuse_state(state, current, free={kind for kind, values in self.method.state.items() if isinstance(values, dict)})
        self._give_back()
        self.weights.watched.clear()  # of masks that go now
        for kind, values in current["tensors"].items():
            if isinstance(self.method.state.get(kind), dict):
                self.method.state[kind] = {name: tensor.clone() for name, tensor in state["tensors"][kind].items()}
            else:
                for name, tensor in values.items():
                    to_local(tensor).copy_(local_piece(tensor, state["tensors"][kind][name]))
        self.weights.counts = torch.tensor(state["counts"], device=self.weights.counts.device)
        self.clock.step = state["step"]
        self.method.set_time(self.clock)
        self.weights.show_effective()

    def _give_back(self) -> None:
        """To a model that was loaded before `sparsify`, what the first mask took; one that was loaded since is left alone."""
        if self._given is not None:
            given, left = self._given
            if left == self._digest():
                torch._foreach_copy_(self.weights.values, given)
            self._given = None

    def _digest(self) -> list[float]:
        """Tells whether anybody has written other weights into the parameters."""
        return [v.sum(dtype=torch.float64).item() for v in self.weights.values]

    def _identity(self) -> dict[str, Any]:
        """What a state must have in common with the sparsifier that loads it."""
        return {
            "method": self.name,
            "options": asdict(self.method),
            "sparsity": self.weights.target,
            "epochs": self.clock.epochs,
            "steps_per_epoch": self.clock.steps_per_epoch,
        }

    def _by_name(self, values: list[Tensor] | dict[str, Tensor]) -> dict[str, Tensor]:
        if isinstance(values, dict):
            return values
        return {name: distribute_like(p, value) for name, p, value in zip(self.weights.names, self.weights.parameters, values)}

    def _announced(self) -> str:
        clock = self.clock
        return (
            f"{clock.total} were announced (epochs={clock.epochs} × steps_per_epoch={clock.steps_per_epoch}, "
            "which counts optimizer steps)"
        )

    @torch.no_grad()
    def finish(self) -> None:
        """Leave the plain, sparse model behind: hooks off, latent weights and scores freed; masks and summary stay."""
        self._close()
        if not self._hooks:
            return
        self.weights.check()
        weights = self.weights
        if self.method.learns_sparsity:
            if abs(self.sparsity - weights.target) > 0.01:
                warnings.warn(
                    f"training ended at sparsity {self.sparsity:.4f}, not {weights.target}: {self.name} learns it, and its "
                    f"options lead it ({self.method})",
                    stacklevel=3,
                )
        elif int(weights.counts[:, 0].sum()) != zeros_at(weights.target, weights.size):
            warnings.warn(
                f"training ended at sparsity {self.sparsity:.4f}, short of {weights.target}: {self.clock.step} optimizer steps "
                f"were seen, but {self._announced()}. One last cut brings it to {weights.target}, with no training after it",
                stacklevel=3,
            )
            weights.show_latent()
            self.method.cut(weights, weights.target)
            weights.check()
            weights.show_effective()
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        weights.latent, self.method.state = None, {}
        ATTACHED.discard(self.optimizer)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "a sparsifier cannot be copied or pickled: torch does so to an optimizer without its hooks, and the copy would "
            "train dense. Call sparsify on the copied model and optimizer, and load_state_dict this one's state_dict"
        )

    def __repr__(self) -> str:
        at = f"step {self.clock.step} of {self.clock.total}"
        return f"Sparsifier({self.method}, sparsity {self.sparsity:.4f} of {self.weights.target}, {at})"


ATTACHED: WeakSet[torch.optim.Optimizer] = WeakSet()


def as_tuple(patterns: Pattern | Iterable[Pattern]) -> tuple[Pattern, ...]:
    alone = isinstance(patterns, (str, type, nn.Module)) or not isinstance(patterns, Iterable)
    found: list[Any] = [patterns] if alone else list(patterns)  # type: ignore[arg-type]
    for pattern in found:
        if not isinstance(pattern, (str, type)):
            raise TypeError(f"{pattern!r} is no pattern; expected a module class or the name of a layer, such as 'encoder.*'")
    return tuple(found)


def resolve(method: str | Method) -> tuple[str, Method]:
    """A method's registered name and a fresh instance of it."""
    if isinstance(method, Method):
        names = [name for name, known in METHODS.items() if known is type(method)]
        return (names[0] if names else type(method).__name__), replace(method)
    if not isinstance(method, str):
        raise TypeError(f"method is {method!r}; expected a name or an instance of a method, such as 'optg' or OptG()")
    if method not in METHODS:
        raise ValueError(f"unknown method {method!r}; {nearest(method, METHODS)}")
    return method, METHODS[method]()


def refuse_optimizer(optimizer: torch.optim.Optimizer, method: Method) -> None:
    reasons = {
        torch.optim.LBFGS: "it evaluates the model many times inside one step, while the latent weights stand in it",
        torch.optim.SparseAdam: "it takes sparse gradients only, and mask scores need dense ones",
    }
    for kind, reason in reasons.items():
        if isinstance(optimizer, kind):
            raise TypeError(f"{kind.__name__} cannot train a sparse model: {reason}. Use SGD, AdamW or another torch optimizer")
    if method.descends and any(group.get("maximize") for group in optimizer.param_groups):
        raise ValueError(
            f"maximize=True: {type(method).__name__} takes gradients for those of a loss that is to fall. Minimize its negative"
        )
    if optimizer in ATTACHED:
        raise ValueError("this optimizer has a sparsifier already; call its finish() first")


def refuse_parameters(parameters: dict[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
    if not parameters:
        raise ValueError(
            "the model has no prunable weight: expected a trained Linear, convolution or attention layer, or an `include` "
            "pattern that names other parameters of two or more dimensions"
        )
    known = set(optimizer_parameters(optimizer))
    if strangers := [name for name, p in parameters.items() if p not in known]:
        raise ValueError(
            f"the optimizer does not own {', '.join(strangers[:3])}{' …' if len(strangers) > 3 else ''}: give it these "
            "parameters, freeze them, or leave them out with `exclude`"
        )


def refuse_state(state: dict[str, Any], current: dict[str, Any], free: set[str]) -> None:
    """Raise unless the state fits; nothing has been changed by then. Of the `free` kinds of tensors any will do."""
    if missing := [key for key in current if key not in state]:
        raise ValueError(f"this is no sparsifier state: it has no {missing[0]!r}")
    for key in ("method", "options", "sparsity", "epochs", "steps_per_epoch"):
        if state[key] != current[key]:
            raise ValueError(f"the state was saved with {key}={state[key]!r}, here it is {current[key]!r}; expected the same")
    for kind, layers in current["tensors"].items():
        if kind not in state["tensors"]:
            raise ValueError(f"the state has no {kind}: it was saved after finish(), when there is nothing to go on with")
        if kind in free:
            continue
        saved = state["tensors"][kind]
        if odd := sorted(set(saved) ^ set(layers)):
            side = "the state alone" if odd[0] in saved else "this model alone"
            raise ValueError(f"the state belongs to another model: {odd[0]} ({kind}) is in {side}")
        for name, tensor in layers.items():
            if saved[name].shape != tensor.shape:
                shapes = f"{tuple(saved[name].shape)} in the state, {tuple(tensor.shape)} here"
                raise ValueError(f"the state belongs to another model: {name} ({kind}) has the shape {shapes}")


def closure_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any] | None:
    """That of a call of `step`, whose `args` begin with the optimizer itself."""
    return kwargs.get("closure", args[1] if len(args) > 1 else None)


def handing_out(loss: Any, optimizer: torch.optim.Optimizer) -> Callable[[], Any]:
    """A closure for the optimizer to call before it moves a weight; one that calls it later wants another loss than this."""
    versions = [p._version for p in optimizer_parameters(optimizer)]

    def closure() -> Any:
        if versions != [p._version for p in optimizer_parameters(optimizer)]:
            raise RuntimeError(
                f"{type(optimizer).__name__} evaluates the model at weights of its own inside a step, where the latent "
                "weights stand in it. Use SGD, AdamW or another optimizer that evaluates it once, before it moves"
            )
        return loss

    return closure


def unscale(optimizer: torch.optim.Optimizer) -> Tensor | None:
    """Undo a GradScaler's scale where it leaves that to a fused optimizer, which reads `grad_scale` and `found_inf`.

    Returns whether the optimizer will skip this step, as a tensor on the device (no sync), or None where it cannot.
    Gradients of a skipped step become 0.
    """
    found_inf = getattr(optimizer, "found_inf", None)
    if found_inf is None:
        return None
    skipped, scale = found_inf.reshape(()).bool(), getattr(optimizer, "grad_scale", None)
    for grad in (to_local(p.grad) for p in optimizer_parameters(optimizer) if p.grad is not None):
        if scale is not None:
            grad.div_(scale.to(grad.device))
        grad.masked_fill_(skipped.to(grad.device), 0.0)
    if scale is not None:
        optimizer.grad_scale = torch.ones_like(scale)  # type: ignore[attr-defined]
    return skipped
