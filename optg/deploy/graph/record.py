"""Record the operations of a plain model, in a fraction of the time that torch.export takes.

The model runs once on fake tensors, which have no values, and whose batch size is a symbol. In inference mode torch hands every
operation to the recorder whole, as torch.export records it. The recorder leaves the model to torch.export if it meets anything
else: sizes that are computed from the batch, decisions on the batch size or on values, tensors that are neither inputs nor
parameters nor buffers, operations that a packed file may not use, or attributes that forward changes.
"""

import inspect
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from optg.deploy.graph.nodes import Ref
from optg.deploy.graph.operations import is_permitted
from optg.deploy.graph.translate import InputSpec, Trace, is_identity, is_plain_clone, replace_inplace_ops

PT2E = "quantized_decomposed"  # the namespace of the operations that PyTorch's quantization writes
PLAIN_VALUES = (type(None), bool, int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format)


class NotPlain(Exception):
    """The recorder leaves this model to torch.export."""


def require(condition: bool) -> None:
    if not condition:
        raise NotPlain


def record(model: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor], batched: Sequence[Tensor]) -> Trace | None:
    """Run the model once and return its operations, or None if the model is not plain.

    Args:
        batched: the inputs whose first dimension is the batch, which must be at least 2.
    """
    try:
        with unchanged_attributes(model), flags_of_export():
            return record_plain(model, args, kwargs, {id(value) for value in batched})
    except Exception:  # whatever the model or torch raises: torch.export finds out why
        return None


def record_plain(model: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor], batched: set[int]) -> Trace:
    # Imported here: if another version of torch has them elsewhere, torch.export captures the model.
    from torch._dispatch.python import enable_python_dispatcher
    from torch._subclasses.fake_impls import fast_detach
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

    shape_env = ShapeEnv()
    mode = FakeTensorMode(shape_env=shape_env)
    recorder = Recorder(partial(fast_detach, mode))

    def fake_input(value: Tensor) -> Tensor:
        sizes = [DimDynamic.DUCK if i == 0 and id(value) in batched else DimDynamic.STATIC for i in range(value.ndim)]
        context: Any = StatelessSymbolicContext(dynamic_sizes=sizes, constraint_sizes=[None] * value.ndim)
        fake: Tensor = mode.from_tensor(value, symbolic_context=context)  # DUCK: all inputs share one symbol
        return fake

    given = inspect.signature(model.forward).bind(*args, **kwargs).arguments
    require(all(map(operator.is_, given.values(), (*args, *kwargs.values()))) and not isinstance(model, torch.jit.ScriptModule))
    inputs = {name.lower(): fake_input(value) for name, value in given.items()}
    require(len(inputs) == len(args) + len(kwargs))
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    fakes: dict[str, Tensor] = {name: mode.from_tensor(value, static_shapes=True) for name, value in tensors.items()}
    for name, fake in inputs.items():
        recorder.add_placeholder(fake).name = name
    tensor_of = {recorder.add_placeholder(fake).name: (name, tensors[name]) for name, fake in fakes.items()}
    values = list(inputs.values())
    positional, named = tuple(values[: len(args)]), dict(zip(kwargs, values[len(args) :]))
    with without_fast_kernels(), enable_python_dispatcher(), mode, recorder, torch.inference_mode():
        outputs = torch.func.functional_call(model, fakes, positional, named)
    require(recorder.plain and not shape_env.guards and not shape_env.deferred_runtime_asserts)
    require(replace_inplace_ops(recorder.graph))
    for node in recorder.graph.nodes:
        require(node.op == "placeholder" or (node.name not in inputs and is_usual(node)))
    shapes = [(None, *value.shape[1:]) if id(value) in batched else tuple(value.shape) for value in given.values()]
    specs = [InputSpec(name, shape, fake.dtype) for (name, fake), shape in zip(inputs.items(), shapes)]
    return Trace(recorder.graph, specs, tensor_of, pytree.tree_map(recorder.output, outputs))


def is_usual(node: fx.Node) -> bool:
    """Return whether a packed file may use the operation, or needs none, or whether the PT2E flow wrote it."""
    name = str(node.target)
    permitted = is_permitted(name) or name.startswith(PT2E)
    return permitted or node.target is operator.getitem or is_identity(node) or is_plain_clone(node)


class Recorder(TorchDispatchMode):
    """Records every operation on fake tensors as a node of a graph, named as torch.export names it."""

    def __init__(self, copy: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.copy = copy  # returns another tensor of the same shape
        self.graph = fx.Graph()
        self.nodes: dict[int, fx.Node] = {}  # by the id of the tensor
        self.alive: list[Tensor] = []  # so that no other tensor gets their ids
        self.known: dict[Any, Tensor] = {}  # results, by operation and arguments
        self.plain = True  # False after an error, which the model may catch

    def add_placeholder(self, fake: Tensor) -> fx.Node:
        node = self.graph.placeholder("placeholder")
        self.add_result(fake, node)
        return node

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default:
            return func(*args, **kwargs)
        try:
            new_args, new_kwargs = self.argument(tuple(args)), self.argument(kwargs)
            node = self.graph.create_node("call_function", func, new_args, new_kwargs, name=func.overloadpacket.__name__)
            result = self.run(func, args, kwargs, node)
            self.add_result(result, node)
        except BaseException:
            self.plain = False
            raise
        return result

    def run(self, func: Any, args: Any, kwargs: dict[str, Any], node: fx.Node) -> Any:
        """Return the operation's result, or a copy of the result for arguments like these: torch is slow to compute strides."""
        require(torch.Tag.inplace_view not in func.tags)  # no tensor changes its shape
        if func._schema.is_mutable or any(value.alias_info is not None for value in func._schema.returns):
            return func(*args, **kwargs)
        if func is torch.ops.aten.relu.default and args[0].is_contiguous():  # torch takes 10 ms to find the same shape
            return self.copy(args[0])
        known_by = node.args
        if func.namespace == PT2E:  # the result's shape and type do not depend on scales and zero points
            known_by = tuple(value for value in node.args if not isinstance(value, (int, float)))
        key = func, torch.get_default_dtype(), hashable(known_by), hashable(node.kwargs)
        if key in self.known:
            return self.copy(self.known[key])
        result = func(*args, **kwargs)
        if isinstance(result, Tensor) and id(result) not in self.nodes:  # dropout returns its input
            self.known[key] = result
        return result

    def add_result(self, result: Any, node: fx.Node) -> None:
        if isinstance(result, Tensor):
            self.nodes[id(result)] = node
            node.meta["like"] = str(result.shape), str(result.stride()), result.dtype, result.device
            self.alive.append(result)
            return
        require(isinstance(result, (tuple, list)))  # not a number: fake tensors have no values
        for i, part in enumerate(result):
            self.add_result(part, self.graph.create_node("call_function", operator.getitem, (node, i), name="getitem"))

    def argument(self, value: Any) -> Any:
        """Return an argument with a node in place of each tensor."""
        kind = type(value)
        if kind in PLAIN_VALUES:
            return value
        if kind in (tuple, list):
            return kind(map(self.argument, value))
        if kind is dict:
            return {key: self.argument(item) for key, item in value.items()}
        require(id(value) in self.nodes)  # a size that depends on the batch, or a tensor from elsewhere
        return self.nodes[id(value)]

    def output(self, value: Any) -> Any:
        """Return an output with a Ref in place of a tensor."""
        if isinstance(value, Tensor):
            return Ref(self.argument(value).name)
        require(type(value) in (type(None), bool, int, float, str))
        return value


def hashable(value: Any) -> Any:
    """Return an argument with the type of each value, and the metadata of tensors in place of their nodes."""
    if isinstance(value, fx.Node):
        return value.meta["like"]
    if isinstance(value, (tuple, list)):
        return tuple(map(hashable, value))
    if isinstance(value, dict):
        return tuple((key, hashable(item)) for key, item in value.items())
    return type(value), value


@contextmanager
def flags_of_export() -> Iterator[None]:
    """Let `torch.compiler.is_exporting()` and `is_compiling()` return True, as torch.export does."""
    names = [name for name in ("_is_compiling_flag", "_is_exporting_flag") if hasattr(torch.compiler, name)]
    before = [getattr(torch.compiler, name) for name in names]
    try:
        for name in names:
            setattr(torch.compiler, name, True)
        yield
    finally:
        for name, value in zip(names, before):
            setattr(torch.compiler, name, value)


@contextmanager
def without_fast_kernels() -> Iterator[None]:
    """Disable kernels that torch chooses by the batch size. torch.export disables them too, and its graph says so."""
    backends = (torch.backends.mkldnn, torch.backends.nnpack, torch.backends.cudnn)
    enabled = [backend.set_flags(False)[0] for backend in backends]
    try:
        yield
    finally:
        for backend, was_enabled in zip(backends, enabled):
            backend.set_flags(was_enabled)


@contextmanager
def unchanged_attributes(model: nn.Module) -> Iterator[None]:
    """Restore the modules' attributes at the end of the block. Raise NotPlain if one changed, or what one contains."""
    before = {module: (dict(vars(module)), list(contents(vars(module)))) for module in model.modules()}
    changed = False
    try:
        yield
    finally:
        for module, (attributes, known) in before.items():
            now = list(contents(vars(module)))
            if len(now) != len(known) or not all(map(operator.is_, now, known)):
                changed = True
                vars(module).clear()
                vars(module).update(attributes)
    require(not changed)


def contents(value: Any) -> Iterator[Any]:
    """Yield what a container and the containers in it hold."""
    for item in value.values() if isinstance(value, dict) else value:
        if isinstance(item, (dict, list, tuple, set)):
            yield from contents(item)
        else:
            yield item
    if isinstance(value, dict):
        yield from value
