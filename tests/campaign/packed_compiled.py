"""Part: forged packed files are compiled, run by the engine under sanitizers, and compared with torch.

What runs on bytes is compared with the integer reference, bit by bit.

python -m tests.campaign.packed_compiled --count 100000 --seed 0 --seconds 7200
"""

import warnings
from typing import Any

import pytest
import torch

from optg.deploy.engine import build, structs
from optg.deploy.engine.int8.convolution import ConvolutionCall
from optg.deploy.engine.int8.segment import Int8Segment
from optg.deploy.engine.plan import Segment
from optg.deploy.graph import GraphError, run_graph
from optg.deploy.graph.interpret import call, execute
from tests.campaign.forging import forge
from tests.campaign.packed_mutations import load, make_inputs, prepare, tensors_of
from tests.campaign.seeds import parse_args, restart_under_sanitizers, run_seeds
from tests.deploy.engine.harness import RandomTuner, compile_graph
from tests.deploy.engine.int8 import reference
from tests.deploy.engine.test_sanitizers import SANITIZED, exact_arena

LARGE = 2**23  # numbers; the comparison would need several times as much memory


class AnyTuner(RandomTuner):
    """Chooses any tiling of layers on floats and on bytes."""

    def choose(self, layer: Any, arena: int) -> Any:
        if not isinstance(layer, ConvolutionCall):
            return super().choose(layer, arena)
        layer.fill(tiling := self.random.choice(layer.tilings()))
        return tiling


def case(seed: int) -> str:
    if (model := load(forge(seed, gentle=True))) is None:
        return "refused"
    graph, inputs = model.graph, make_inputs(model, seed)
    with torch.no_grad():
        try:
            plain = tensors_of(run_graph(graph, *inputs))
        except GraphError:
            return "cannot run"
        if any(dtype != torch.float32 for dtype in graph.dtypes):
            return "runs in torch"
        if sum(tensor.numel() for tensor in plain) > LARGE:
            return "large"
        try:
            fast = compile_graph(graph, 1 + seed % 2, "scalar", tuner=AnyTuner)
        except GraphError:  # it does not fit every batch size
            return "cannot be compiled"
        got = tensors_of(fast(*inputs))
        parts = {type(part) for part in fast.network.parts}
        if not parts & {Segment, Int8Segment}:
            return "runs in torch"
        assert [tuple(t.shape) for t in got] == [tuple(t.shape) for t in plain], "another shape"
        if Int8Segment in parts:
            return "compiled to int8"
        if not all(tensor.isfinite().all() for tensor in plain if tensor.is_floating_point()):
            return "not finite"
        exact = exact_outputs(graph, inputs)
        if exact is not None and not all(tensor.isfinite().all() for tensor in exact if tensor.is_floating_point()):
            exact = None  # such as an overflow of another dtype
        for a, b, right in zip(got, plain, exact or plain):
            error, rounding = ((t.double() - right.double()).abs().amax().item() if t.numel() else 0.0 for t in (a, b))
            largest = right.double().abs().amax().item() if right.numel() else 0.0
            if error > max(1e-4 * max(1.0, largest), 50 * rounding):
                assert jumps(graph, inputs, plain, error / 2), f"differs by {error:g} of {largest:g}"
                return "jumps"
    return "compiled" if exact else "compiled, compared in float32"


def exact_outputs(graph, inputs):
    """Return the outputs in float64, or None if an operation does not accept that."""
    wide = {name: t.double() if t.dtype == torch.float32 else t for name, t in graph.tensors.items()}
    try:
        return tensors_of(run_graph(graph, *(x.double() for x in inputs), tensors=wide))
    except GraphError:
        return None


def jumps(graph, inputs, plain, least: float) -> bool:
    """Return whether rounding errors of 1e-6 change an output by this much, as for ceil(tanh(100)), which may be 1 or 2."""
    generator = torch.Generator().manual_seed(0)

    def compute(op, args, named):
        result = call(op, args, named)
        if not isinstance(result, torch.Tensor) or not result.is_floating_point():
            return result
        noise = torch.rand(2, *result.shape, generator=generator, dtype=torch.float64).mul(2e-6).sub(1e-6).to(result.dtype)
        return result * (1 + noise[0]) + 1e-30 * noise[1].sign()

    runs = [tensors_of(execute(graph, inputs, graph.tensors, compute=compute)) for _ in range(8)]
    return any((a.double() - b.double()).abs().amax() >= least for run in runs for a, b in zip(run, plain) if a.numel())


def main() -> None:
    args = parse_args(__doc__)
    restart_under_sanitizers()
    warnings.simplefilter("ignore")
    build.ISAS["scalar"] = SANITIZED
    structs.arena = exact_arena
    reference.compare_runs(pytest.MonkeyPatch())
    prepare()
    build.library("scalar")
    run_seeds(case, args.count, args.seed, args.seconds)


if __name__ == "__main__":
    main()
