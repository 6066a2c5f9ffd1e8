"""Part: forged packed files are loaded and run by torch. Each is refused in one line, or runs with the same result twice.

    python -m tests.campaign.packed_mutations --count 1000000 --seed 0 --seconds 7200

It runs under AddressSanitizer, which checks every allocation and copy of torch too. With --plain there is no sanitizer; then
new memory is filled with two different patterns in the two runs, so that a result which depends on uninitialised memory shows.

Loading a file computes the shape of every value on torch's meta device, in Python, which takes half of the time. Mutants of one
file differ little, so shapes that are known from earlier files are not computed again.
"""

import ctypes
import warnings
from typing import Any

import torch
from torch import Tensor

from optg.deploy.graph import GraphError, interpret
from optg.deploy.packed import PackedError, PackedModel, unpack
from tests.campaign.forging import bases, forge
from tests.campaign.seeds import parse_args, restart_under_sanitizers, run_seeds

PERTURB = -6  # glibc's M_PERTURB
MOST_SHAPES = 4096  # that are remembered


def load(content: bytes) -> PackedModel | None:
    """Return the model in a forged file, or None if it is refused."""
    try:
        return unpack(content)
    except (PackedError, GraphError) as error:
        assert str(error) and "\n" not in str(error), "the error is not one line"
        return None


def make_inputs(model: PackedModel, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [[1 + seed % 3 if n is None else n for n in shape] for shape in model.graph.shapes]
    return [(3 * torch.randn(shape, generator=generator)).to(dtype) for shape, dtype in zip(shapes, model.graph.dtypes)]


def tensors_of(value: Any) -> list[Tensor]:
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [value] if isinstance(value, Tensor) else [tensor for item in items for tensor in tensors_of(item)]


def same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)


def case(seed: int, fill: Any = lambda byte: None) -> str:
    if (model := load(forge(seed))) is None:
        return "refused"
    inputs = make_inputs(model, seed)
    with torch.no_grad():
        try:
            fill(1)
            first = [tensor.clone() for tensor in tensors_of(model(*inputs))]
            fill(0x55)
            second = tensors_of(model(*inputs))
        except GraphError as error:
            assert str(error) and "\n" not in str(error), "the error is not one line"
            return "cannot run"
        finally:
            fill(0)
    assert all(map(same, first, second)), "two runs differ"
    return "runs"


def remember_shapes() -> None:
    """Let dry runs compute an operation on meta tensors of the same shapes only once."""
    compute, known = interpret.call, {}

    def call(op: str, args: Any, named: dict[str, Any]) -> Any:
        key = op, key_of(args), key_of(named)
        if key not in known:
            if len(known) >= MOST_SHAPES:
                known.clear()
            known[key] = compute(op, args, named)
        return known[key]

    interpret.call = call  # used by dry runs only: other runs have it as a default argument


def key_of(value: Any) -> Any:
    """Return what the result of an operation on meta tensors depends on. It tells 1, 1.0 and True apart."""
    kind = type(value)
    if isinstance(value, Tensor):
        return kind, value.shape, value.stride(), value.dtype
    if kind in (tuple, list):
        return kind, *map(key_of, value)
    if kind is dict:
        return kind, *((name, key_of(item)) for name, item in value.items())
    return kind, value


def prepare() -> None:
    """Import and build what every child needs."""
    remember_shapes()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    bases()
    for seed in range(20):
        load(forge(seed))


def main() -> None:
    args = parse_args(__doc__, "plain")
    if args.plain:
        c = ctypes.CDLL(None)
        prepare()
        run_seeds(lambda seed: case(seed, lambda byte: c.mallopt(PERTURB, byte)), args.count, args.seed, args.seconds)
        return
    restart_under_sanitizers()
    prepare()
    run_seeds(case, args.count, args.seed, args.seconds)


if __name__ == "__main__":
    main()
