"""optg.quantize: a model with int8 weights and activations, by PyTorch's PT2E flow.

quantized = optg.quantize(model, batches)       # post-training: observes the activations on a few batches
fast = optg.compile(quantized, example_input)   # runs on bytes, and skips the zeros

Activations are u8 with a zero point per tensor. Weights are s8, symmetric, with a scale per output channel, so zeros stay
exactly zero. Batch norms are folded first. docs/int8.md has the details.
"""

import copy
import fnmatch
import inspect
import itertools
import logging
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._ops import OpOverload
from torch.export import ExportedProgram
from torch.utils._pytree import tree_map

from optg.core.accounting import as_arguments
from optg.core.preserve import evaluating
from optg.core.prunable import unwrap
from optg.deploy.graph.capture import export_any_batch, export_fixed_batch

aten = torch.ops.aten
LAYERS = (aten.conv2d.default, aten.linear.default)
SUMS = (aten.add.Tensor,)
CLAMPS = (aten.relu.default, aten.relu6.default, aten.hardtanh.default, aten.clamp.default, aten.clamp_min.default)
SAME_SCALE = (aten.max_pool2d.default, aten.flatten.using_ints, aten.reshape.default, aten.view.default)
OTHERS = (
    aten.adaptive_avg_pool2d.default, aten.avg_pool2d.default, aten.mean.dim, aten.cat.default, aten.silu.default,
    aten.hardswish.default, aten.hardsigmoid.default, aten.sigmoid.default, aten.tanh.default, aten.leaky_relu.default,
)  # fmt: skip
NORM = aten.batch_norm.default  # in training; otherwise it is folded before annotation


def quantize(model: nn.Module, batches: Iterable[Any], *, keep_float: Sequence[str] = ()) -> nn.Module:
    """Return a quantized copy of the model, in evaluation mode.

    Args:
        batches: typical inputs, on which the range of every activation is observed: each what the model is called with (a
            tensor, a tuple of tensors, or a dict of named ones). Further entries of a tuple, such as labels, are ignored.
        keep_float: patterns of module names, such as "layer4.*", that stay in float32.
    """
    pt2e = import_pt2e()
    examples = iter(batches)
    first = next(examples, None)
    if first is None:
        raise ValueError("there are no batches to observe activations on; expected at least one")
    model = copy.deepcopy(unwrap(model)).cpu()
    count = number_of_inputs(model)
    with evaluating(model), quiet():
        prepared = pt2e.prepare_pt2e(export(model, inputs_of(first, count)).module(), int8_quantizer(keep_float=keep_float))
        with torch.no_grad():
            for batch in itertools.chain([first], examples):
                args, kwargs = as_arguments(inputs_of(batch, count))
                prepared(*args, **kwargs)
        return convert(prepared)


def convert(prepared: fx.GraphModule) -> nn.Module:
    """Return the quantized model that a prepared graph, in evaluation mode, stands for."""
    names = [weight_name(layer) for layer in layers_of(prepared)]
    converted = import_pt2e().convert_pt2e(prepared)
    restore_names(converted, names)
    for name in ("train", "eval"):  # PT2E forbids them; no operation of this graph depends on the mode
        vars(converted).pop(name, None)
    return converted.eval().requires_grad_(False)


def import_pt2e() -> Any:
    """Return the functions and classes of PT2E that are used here."""
    try:
        with quiet():
            from torchao.quantization import pt2e
            from torchao.quantization.pt2e import quantize_pt2e, quantizer
    except ImportError as error:
        raise ImportError(f"int8 needs torch >= 2.11 and torchao: pip install 'optg[int8]' ({error})") from None
    return SimpleNamespace(**{**vars(pt2e), **vars(quantizer), **vars(quantize_pt2e)})


@contextmanager
def quiet() -> Iterator[None]:
    """Silence what torch and torchao say about themselves."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(logging.NOTSET)


def number_of_inputs(model: nn.Module) -> int:
    """Return how many positional inputs the model takes."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(model.forward).parameters.values()
    if any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters):
        return sys.maxsize
    required = [p for p in parameters if p.kind in kinds and p.default is inspect.Parameter.empty]
    return max(1, len(required))


def inputs_of(batch: Any, count: int) -> Any:
    """Return a batch on the CPU, without entries that the model does not take."""
    if isinstance(batch, (tuple, list)):
        batch = tuple(batch[:count])
    return tree_map(lambda value: value.detach().cpu() if isinstance(value, Tensor) else value, batch)


def export(model: nn.Module, batch: Any) -> ExportedProgram:
    args, kwargs = as_arguments(batch)
    return export_any_batch(model, args, kwargs) or export_fixed_batch(model, args, kwargs)


def int8_quantizer(*, training: bool = False, keep_float: Sequence[str] = ()) -> Any:
    """Return a quantizer for PT2E that annotates what the engine runs on bytes.

    Args:
        training: whether it is for `prepare_qat_pt2e`, which trains with fake quantization, or for `prepare_pt2e`.
        keep_float: patterns of module names that stay in float32.
    """
    pt2e = import_pt2e()
    if training:
        return make_quantizer(pt2e, *training_specs(pt2e), keep_float)
    return make_quantizer(pt2e, *observing_specs(pt2e, pt2e.HistogramObserver), keep_float)


def make_quantizer(pt2e: Any, activation: Any, weight: Any, keep_float: Sequence[str] = ()) -> Any:
    """Return a quantizer that uses these specs."""

    class Int8Quantizer(pt2e.Quantizer):
        def transform_for_annotation(self, model: fx.GraphModule) -> fx.GraphModule:
            return without_inplace_ops(model)

        def annotate(self, model: fx.GraphModule) -> fx.GraphModule:
            check_patterns(model, keep_float)
            layers = [layer for layer in layers_of(model) if fits(layer) and not is_kept(layer, keep_float)]
            norms = [norm for layer in layers if (norm := norm_after(layer)) is not None]
            kinds = (*SUMS, *CLAMPS, *SAME_SCALE, *OTHERS)
            others = [node for node in model.graph.nodes if node.target in kinds and fits(node)]
            chosen = {*layers, *norms, *others}
            open_nodes = absorbed(model, chosen)
            for node in [node for node in model.graph.nodes if node in chosen]:  # in order: PT2E numbers its modules
                specs = {each: activation for each in node.all_input_nodes if each not in open_nodes and is_float(each)}
                if node in layers:
                    specs = {node.args[0]: activation, node.args[1]: weight}
                if node in norms:
                    specs = {}
                result = None
                if node not in open_nodes and any(user in chosen for user in node.users):
                    shares = node.target in SAME_SCALE
                    result = pt2e.SharedQuantizationSpec((node.args[0], node)) if shares else activation
                node.meta["quantization_annotation"] = pt2e.QuantizationAnnotation(specs, result, _annotated=True)
            return model

        def validate(self, model: fx.GraphModule) -> None:
            refuse_norms(model)

    return Int8Quantizer()


def observing_specs(pt2e: Any, observer: Any) -> tuple[Any, Any]:
    """Return how activations and weights are quantized after training: by an observer, and by the largest magnitude."""
    return (
        pt2e.QuantizationSpec(torch.uint8, observer, 0, 255, torch.per_tensor_affine),
        pt2e.QuantizationSpec(torch.int8, pt2e.PerChannelMinMaxObserver, -127, 127, torch.per_channel_symmetric, 0),
    )


def training_specs(pt2e: Any) -> tuple[Any, Any]:
    """Return the same for training: activations by a moving average of their range, weights by their range in each step."""
    average, per_channel = pt2e.MovingAverageMinMaxObserver, pt2e.MovingAveragePerChannelMinMaxObserver
    fake = pt2e.FusedMovingAvgObsFakeQuantize
    observed = fake.with_args(observer=average, averaging_constant=0.01)
    current = fake.with_args(observer=per_channel, averaging_constant=1.0)
    return (
        pt2e.QuantizationSpec(torch.uint8, observed, 0, 255, torch.per_tensor_affine),
        pt2e.QuantizationSpec(torch.int8, current, -127, 127, torch.per_channel_symmetric, 0),
    )


def without_inplace_ops(model: fx.GraphModule) -> fx.GraphModule:
    """Replace `relu_` and the like by `relu` where nothing else sees the value: PT2E fuses and annotates only those."""
    for node in model.graph.nodes:
        if not isinstance(node.target, OpOverload) or not node.target._schema.name.endswith("_"):
            continue
        source = node.args[0]
        packet = getattr(aten, node.target._schema.name.removeprefix("aten::").removesuffix("_"), None)
        out_of_place = getattr(packet, node.target._overloadname, None)
        if out_of_place and owns_result(source) and len(source.users) == 1:
            node.target = out_of_place
    model.recompile()
    return model


def owns_result(node: fx.Node) -> bool:
    """Return whether a node is an operation whose result shares its memory with no other value."""
    operation = node.target
    return isinstance(operation, OpOverload) and all(value.alias_info is None for value in operation._schema.returns)


def norm_after(layer: fx.Node) -> fx.Node | None:
    """Return the batch norm that PT2E will fold into a convolution, if there is one."""
    if layer.target is not aten.conv2d.default or len(layer.users) != 1:
        return None
    user = next(iter(layer.users))
    return user if user.target is NORM else None


def refuse_norms(model: fx.GraphModule) -> None:
    """Raise if a batch norm has options that PT2E would silently replace by torch's defaults when it fuses it for training."""
    for node in model.graph.nodes:
        if node.target is NORM and tuple(node.args[6:8]) != (0.1, 1e-5):
            momentum, eps = node.args[6:8]
            raise ValueError(
                f"{node.args[1].target} belongs to a batch norm with momentum {momentum} and eps {eps}; to train in int8, "
                "torchao needs momentum 0.1 and eps 1e-05"
            )


def layers_of(model: fx.GraphModule) -> list[fx.Node]:
    """Return the convolutions and linear layers whose weight is stored in the model."""
    return [node for node in model.graph.nodes if node.target in LAYERS and weight_name(node) is not None]


def weight_name(layer: fx.Node) -> str | None:
    """Return the name of a layer's weight, which an observer may watch."""
    node = layer.args[1]
    if isinstance(node, fx.Node) and node.op == "call_module":
        node = node.args[0]
    return str(node.target) if isinstance(node, fx.Node) and node.op == "get_attr" else None


def is_kept(layer: fx.Node, patterns: Sequence[str]) -> bool:
    name = str(weight_name(layer))
    return any(fnmatch.fnmatchcase(each, pattern) for each in (name, name.rpartition(".")[0]) for pattern in patterns)


def check_patterns(model: fx.GraphModule, patterns: Sequence[str]) -> None:
    for pattern in patterns:
        if not any(is_kept(layer, [pattern]) for layer in layers_of(model)):
            names = [str(weight_name(layer)).rpartition(".")[0] for layer in layers_of(model)]
            raise ValueError(f"keep_float: no layer is named {pattern!r}; the layers are {', '.join(names)}")


def is_float(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.dtype == torch.float32


def fits(node: fx.Node) -> bool:
    """Return whether inputs and result are float32 batches of images or features: the engine quantizes no others."""
    values = [each.meta.get("val") for each in (node, *node.all_input_nodes) if each.op != "get_attr"]
    first = next(each.meta["val"] for each in node.graph.nodes if each.op == "placeholder")
    batch = str(first.shape[0])  # as text: a comparison of symbolic sizes would fix them
    floats = [v for v in values if isinstance(v, Tensor) and v.dtype == torch.float32 and v.ndim in (2, 4)]
    return len(floats) == len(values) and all(str(value.shape[0]) == batch for value in floats)


def absorbed(model: fx.GraphModule, chosen: set[fx.Node]) -> set[fx.Node]:
    """Return the nodes whose result stays in 32 bits because the next operation is computed with it: a sum, or a clamp."""
    found: set[fx.Node] = set()
    for node in model.graph.nodes:
        if node not in chosen or node.target not in (*LAYERS, NORM, *SUMS) or len(node.users) != 1:
            continue
        user = next(iter(node.users))
        taken = any(each in found for each in user.all_input_nodes)
        added = node.target not in SUMS and user.target in SUMS and not taken
        if user in chosen and (user.target in (NORM, *CLAMPS) or added):
            found.add(node)
    return found


def submodule(model: nn.Module, name: str) -> nn.Module:
    """Return a submodule; make an empty one if PT2E removed it with its parameters."""
    for part in filter(None, name.split(".")):
        if not hasattr(model, part):
            model.add_module(part, nn.Module())
        model = getattr(model, part)
    return model


def restore_names(model: fx.GraphModule, names: Sequence[str | None]) -> None:
    """Store quantized weights and their scales under the name of the weight: PT2E numbers them."""
    layers = [node for node in model.graph.nodes if node.target in LAYERS]
    for layer, name in zip(layers, names):
        source = layer.args[1]
        if name is None or "dequantize_per_channel" not in str(source.target):
            continue
        for node, suffix in zip(source.args[:3], ("", "_scale", "_zero_point")):
            value = getattr(model, node.target)
            parent, _, leaf = f"{name}{suffix}".rpartition(".")
            owner = submodule(model, parent)
            if isinstance(getattr(owner, leaf, None), Tensor) and getattr(owner, leaf).dtype == value.dtype:
                continue  # another layer has the same weight
            delattr(owner, leaf) if hasattr(owner, leaf) else None
            owner.register_buffer(leaf, value)
            delattr(model, node.target)
            node.target = f"{name}{suffix}"
    model.recompile()
