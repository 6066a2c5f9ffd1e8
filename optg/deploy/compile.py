"""optg.compile: CPU inference that skips zero weights.

fast = optg.compile(model, example_input)
y = fast(x)                                  # like model.eval()(x)
print(fast)                                  # how each layer runs
"""

import os
import threading
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Literal, NoReturn
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from optg.core.accounting import as_arguments
from optg.deploy.engine.build import Library, NoCompiler, library
from optg.deploy.engine.lower import Network, lower
from optg.deploy.engine.plan import Misfit
from optg.deploy.engine.runner import Runner
from optg.deploy.engine.tune import Tuner
from optg.deploy.graph import Graph, Node, Ref, capture, check_inputs, fill_refs, freed_after, order_inputs, refs_in, run_graph
from optg.deploy.quantize import quantize
from optg.naming import visible

if TYPE_CHECKING:
    from rich.table import Table

COLUMNS = ["layer", "runs as", "shape", "density", "tile"]


def compile(
    model: nn.Module,
    example_input: Any,
    threads: int | None = None,
    *,
    precision: Literal["float32", "int8"] = "float32",
    calibration: Iterable[Any] | None = None,
    keep_float: Sequence[str] = (),
    isa: str | None = None,
) -> "Compiled":
    """Return a copy of the model, in evaluation mode, that runs on the CPU and skips zero weights.

    Args:
        example_input: what the model is called with: a tensor, a tuple of tensors, or a dict of named ones. Later calls may
            have any other batch size, if the model allows it; the first call of a new size takes longer.
        threads: the number of threads; by default as many as torch uses. Results do not depend on it.
        precision: int8 first quantizes the model, as `optg.quantize` does. A quantized model runs on bytes in any case.
        calibration: for int8: batches of typical inputs, on which the range of every activation is observed.
        keep_float: for int8: patterns of module names that stay in float32.
        isa: the instruction set to compile the engine for: native, avx512, avx_vnni, avx2, neon_i8mm,
            neon_dotprod, neon or scalar.
    """
    if threads is not None and (not isinstance(threads, int) or threads < 1):
        raise ValueError(f"threads is {threads}; expected a whole number of at least 1")
    if precision not in ("float32", "int8"):
        raise ValueError(f"precision is {precision!r}; expected 'float32' or 'int8'")
    if precision == "int8":
        if calibration is None:
            raise ValueError("precision='int8' needs calibration=, batches of typical inputs")
        model = quantize(model, calibration, keep_float=keep_float)
    elif calibration is not None or keep_float:
        raise ValueError("calibration= and keep_float= only work with precision='int8'")
    graph = capture(model, example_input)
    for name, dtype in zip(graph.inputs, graph.dtypes):
        if dtype != torch.float32:
            raise ValueError(f"the input {name} is of {dtype}; the engine takes torch.float32")
    fast = Compiled(graph, threads or torch.get_num_threads(), isa)
    args, kwargs = as_arguments(example_input)
    fast(*(value.cpu() for value in args), **{name: value.cpu() for name, value in kwargs.items()})  # plans for this batch
    return fast


class Compiled:
    """A model that the engine runs. `notes` lists what runs in torch instead, and why."""

    def __init__(
        self, graph: Graph, threads: int, isa: str | None = None, make_tuner: Callable[[Library], Tuner] = Tuner
    ) -> None:
        self.graph = replace(graph, tensors={name: tensor.detach().clone() for name, tensor in graph.tensors.items()})
        self.weights_at = set(map(storage, self.graph.tensors.values()))
        self.threads = threads
        self.lock = threading.Lock()
        COMPILED.add(self)
        self.runner: Runner | None = None
        self.library: Library | None = None
        self.network = lower(self.graph)
        try:
            self.library = library(isa, self.network.c_files)
        except NoCompiler as error:
            self.notes = [f"everything runs in torch: {error}"]
            warnings.warn(f"optg.compile falls back to torch: {error}", stacklevel=3)
            return
        self.notes = list(self.network.notes)
        self.runner = Runner(self.library, threads, make_tuner(self.library))
        self.threads = self.runner.threads
        self.freed = freed_after_parts(self.network, self.graph)
        made = {name for part in self.network.parts for name in part.new_tensors}
        returned = [self.network.root(name) for name in refs_in(self.graph.outputs)]
        self.fresh = set(returned) <= made and len(set(returned)) == len(returned)  # is each output a new tensor?

    def __call__(self, *inputs: Tensor, **named: Tensor) -> Any:
        inputs = order_inputs(self.graph, inputs, named)
        batch = check_inputs(self.graph, inputs)
        for name, value in zip(self.graph.inputs, inputs):
            if value.dtype != torch.float32 or value.device.type != "cpu":
                raise ValueError(f"the input {name} is {value.dtype} on {value.device}; the engine takes torch.float32 on cpu")
        with torch.no_grad():
            if self.runner is not None:
                try:
                    with self.lock:
                        outputs = self.execute([value.detach() for value in inputs], batch, self.runner)
                    return outputs if self.fresh else self.unshare(outputs, inputs)
                except (Misfit, MemoryError) as reason:
                    if (note := f"a batch of {batch} ran in torch: {reason}") not in self.notes:
                        self.notes.append(note)
            return self.unshare(run_graph(self.graph, *inputs), inputs)

    def execute(self, inputs: list[Tensor], batch: int, runner: Runner) -> Any:
        """Run all parts. Forget each value after its last use."""
        values: dict[str, Any] = dict(zip(self.graph.inputs, inputs))

        def value(name: str) -> Any:
            for known in (values, self.graph.tensors):
                if name in known:
                    return known[name]
            return self.reshaped(values[self.network.root(name)], name, batch)

        for part in self.network.parts:
            values.update(part.run(value, batch, runner))
            for name in self.freed.get(part.outputs[0], ()):
                values.pop(name, None)
        return fill_refs(self.graph.outputs, {name: value(name) for name in refs_in(self.graph.outputs)})

    def reshaped(self, root: Tensor, name: str, batch: int) -> Tensor:
        """Return `root` in the shape of another name. Raise Misfit if it is not as planned: a shape may depend on the batch."""
        forms = self.network.forms
        if root.shape != (wanted := (batch, *forms[self.network.root(name)])):
            raise Misfit(f"{name} is made from the shape {tuple(root.shape)}; expected {wanted}")
        return root.reshape(batch, *forms[name])

    def unshare(self, outputs: Any, inputs: Sequence[Tensor]) -> Any:
        """Copy outputs that share memory with inputs, weights or each other: a model may return its own input."""
        taken = self.weights_at | set(map(storage, inputs))

        def copied(value: Any) -> Any:
            if isinstance(value, Tensor) and storage(value) in taken:
                value = value.clone()
            taken.update([storage(value)] if isinstance(value, Tensor) else [])
            return value

        return tree_map(copied, outputs)

    def rows(self) -> list[list[str]]:
        """Return how each layer runs, in the order of `COLUMNS`."""
        return [row for part in self.network.parts for row in part.rows()] if self.runner is not None else []

    def summary(self) -> "Table":
        """Return a table of how each layer runs."""
        try:
            from rich.table import Table
            from rich.text import Text
        except ImportError:
            raise ImportError("summary() needs rich: pip install 'optg[cli]'. print() shows the same without it") from None
        table = Table(*COLUMNS)
        for row in self.rows():
            table.add_row(*map(Text, map(visible, row)))  # names may look like markup
        return table

    def __repr__(self) -> str:
        """Return how each layer runs, and the notes, as plain text."""
        table = [COLUMNS, *self.rows()]
        widths = [max(map(len, column)) for column in zip_longest(*table, fillvalue="")]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in table]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError("a compiled model cannot be copied or pickled: it holds threads and addresses; compile the model again")

    def __del__(self) -> None:
        if (runner := getattr(self, "runner", None)) is not None:
            runner.close()


def freed_after_parts(network: Network, graph: Graph) -> dict[str, list[str]]:
    """Return the values that are not needed any more after each part, by the name of its first output."""

    def with_roots(names: Iterable[str]) -> tuple[Ref, ...]:
        return tuple(Ref(each) for name in names for each in (name, network.root(name)))

    nodes = [Node(part.outputs[0], "", with_roots(part.inputs)) for part in network.parts]
    return freed_after(replace(graph, nodes=nodes, outputs=with_roots(refs_in(graph.outputs))))


COMPILED: WeakSet[Compiled] = WeakSet()


def renew_locks() -> None:
    """Replace the locks in a forked child: a thread of the parent may have held one, and does not exist in the child."""
    for fast in COMPILED:
        fast.lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=renew_locks)


def storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
