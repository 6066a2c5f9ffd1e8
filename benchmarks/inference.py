"""Benchmark inference on this CPU (`optg bench`) for models with as many FLOPs as OptG's masks leave, at several sparsities.

    python benchmarks/inference.py --model resnet50 --batches 1 --threads 1

Weights and the positions of zeros are random; inference_layers.py chooses the number of zeros of each layer. Each model is
packed into a file first, so its size is measured, too. --output FOLDER saves all results as JSON.
"""

import argparse
import tempfile
from pathlib import Path

import torch
from inference_layers import FLOPS, SIZES, optg_power, settle, sparsify
from rich.console import Console

import optg
from optg.deploy import bench
from optg.models import build


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="resnet50", choices=list(SIZES))
    parser.add_argument(
        "--sparsity", type=float, nargs="+", help="default: all sparsities for which the FLOPs with OptG are known"
    )
    parser.add_argument("--batches", type=int, nargs="+", default=[1])
    parser.add_argument("--threads", type=int, nargs="+", default=[1])
    parser.add_argument("--engines", nargs="+", default=["optg", "torch.compile", "onnxruntime", "openvino f32"])
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    if options.output:
        options.output.mkdir(parents=True, exist_ok=True)
    classes, size = SIZES[options.model]
    for sparsity in options.sparsity or FLOPS[options.model]:
        torch.manual_seed(0)
        model = settle(sparsify(build(options.model, classes), sparsity, optg_power(options.model, sparsity)))
        name = f"{options.model} at {sparsity:.1%}, random masks with OptG's FLOPs"
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "model.optg"
            optg.save(model, file, torch.zeros(1, 3, size, size), name=name)
            output = options.output and options.output / f"{options.model}-{sparsity:g}.json"
            subject = bench.Subject(str(file))
            bench.run_benchmark(
                subject, options.engines, options.batches, options.threads, options.seconds, output, None, Console()
            )


if __name__ == "__main__":
    main()
