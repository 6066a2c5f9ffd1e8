"""Print the size of packed int8 files of models with random weights and random masks.

python benchmarks/int8_size.py                 # 98 % zeros
python benchmarks/int8_size.py --sparsity 0.9
"""

import argparse
import tempfile
from pathlib import Path

import torch

import optg
from optg.deploy.bench.subject import Subject, open_subject

MODELS = ("vgg19", "resnet50", "mobilenet_v1")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sparsity", type=float, default=0.98)
    sparsity = parser.parse_args().sparsity
    for name in MODELS:
        trained = open_subject(Subject(name, sparsity))
        dense = sum(t.numel() * t.element_size() for t in trained.model.state_dict().values())
        quantized = optg.quantize(trained.model, [torch.randn(2, *trained.about.shape)])
        with tempfile.TemporaryDirectory() as folder:
            size = optg.save(quantized, Path(folder) / "model.optg", trained.example)
        print(f"{name} at {sparsity:.0%}: {size:,} bytes, {size / dense:.2%} of {dense:,}")


if __name__ == "__main__":
    main()
