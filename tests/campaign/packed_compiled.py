"""Part: forged packed files are compiled, run by the engine under sanitizers, and compared with torch.

python -m tests.campaign.packed_compiled --count 100000 --seed 0 --seconds 7200
"""

import warnings

import torch

from optg.deploy.engine import build, structs
from optg.deploy.graph import GraphError, run_graph
from tests.campaign.forging import forge
from tests.campaign.packed_mutations import load, make_inputs, prepare, tensors_of
from tests.campaign.seeds import parse_args, restart_under_sanitizers, run_seeds
from tests.deploy.engine.harness import compile_graph
from tests.deploy.engine.test_sanitizers import SANITIZED, exact_arena

LARGE = 2**23  # numbers; the comparison would need several times as much memory


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
            fast = compile_graph(graph, 1 + seed % 2, "scalar")
        except GraphError:  # it does not fit every batch size
            return "cannot be compiled"
        got = tensors_of(fast(*inputs))
        if not any(type(part).__name__ == "Segment" for part in fast.network.parts):
            return "runs in torch"
        assert [tuple(t.shape) for t in got] == [tuple(t.shape) for t in plain], "another shape"
        if not all(tensor.isfinite().all() for tensor in plain if tensor.is_floating_point()):
            return "not finite"
        exact = exact_outputs(graph, inputs)
        if exact is not None and not all(tensor.isfinite().all() for tensor in exact if tensor.is_floating_point()):
            exact = None  # such as an overflow of another dtype
        for a, b, right in zip(got, plain, exact or plain):
            error, rounding = ((t.double() - right.double()).abs().amax().item() if t.numel() else 0.0 for t in (a, b))
            largest = right.double().abs().amax().item() if right.numel() else 0.0
            assert error <= max(1e-4 * max(1.0, largest), 50 * rounding), f"differs by {error:g} of {largest:g}"
    return "compiled" if exact else "compiled, compared in float32"


def exact_outputs(graph, inputs):
    """Return the outputs in float64, or None if an operation does not accept that."""
    wide = {name: t.double() if t.dtype == torch.float32 else t for name, t in graph.tensors.items()}
    try:
        return tensors_of(run_graph(graph, *(x.double() for x in inputs), tensors=wide))
    except GraphError:
        return None


def main() -> None:
    args = parse_args(__doc__)
    restart_under_sanitizers()
    warnings.simplefilter("ignore")
    build.ISAS["scalar"] = SANITIZED
    structs.arena = exact_arena
    prepare()
    build.library("scalar")
    run_seeds(case, args.count, args.seed, args.seconds)


if __name__ == "__main__":
    main()
