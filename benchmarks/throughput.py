"""Measure images per second of whole `optg train` runs, including data loading: one run, and several that share one GPU.

    python benchmarks/throughput.py --runs 1 2 4 8 --folder DATA

Each run is a process of its own. Only whole epochs during which all runs train are counted: after every run has finished its
first epoch, in which it compiles, and until the first run ends. If there are none, use more --epochs. With --mps, runs share
the GPU through NVIDIA's MPS.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from optg.experiments.mps import multi_process_service


def train(folder: Path, options: list[str], count: int) -> tuple[float, float]:
    """Return the optimizer steps per second of all runs together (nan without a shared whole epoch), and the total seconds."""
    started, processes = time.time(), []
    for i in range(count):
        command = [sys.executable, "-m", "optg", "train", *options, "--seed", str(i), "--output", str(folder / str(i))]
        processes.append(subprocess.Popen(command, stdout=subprocess.DEVNULL))
    ends: list[list[tuple[float, int]]] = [[] for _ in processes]  # per run: time and step at the end of each epoch
    running = True
    while running:
        running = any(process.poll() is None for process in processes)
        for i, seen in enumerate(ends):
            path = folder / str(i) / "metrics.jsonl"
            rows = path.read_text().splitlines() if path.exists() else []
            seen += [(time.time(), json.loads(row)["step"]) for row in rows[len(seen) :]]
        time.sleep(0.02)
    if any(process.returncode for process in processes):
        raise SystemExit("a run failed")
    first, last = max(seen[0][0] for seen in ends), min(seen[-1][0] for seen in ends)
    shared = [[end for end in seen if first <= end[0] <= last] for seen in ends]
    if min(map(len, shared)) < 2:
        return math.nan, time.time() - started
    return sum((end[-1][1] - end[0][1]) / (end[-1][0] - end[0][0]) for end in shared), time.time() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--recipe", default="vgg19-cifar10")
    parser.add_argument("--method", nargs="+", default=["dense", "optg"])
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--folder", default="data")
    parser.add_argument("--mps", action="store_true")
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with multi_process_service(args.mps):
        for method in args.method:
            for count in args.runs:
                options = f"--recipe {args.recipe} --method {method} --epochs {args.epochs} --batch-size {args.batch_size}"
                with tempfile.TemporaryDirectory() as folder:
                    speed, seconds = train(Path(folder), [*options.split(), "--folder", args.folder], count)
                images = f"{speed * args.batch_size:9,.0f} images/s in total"
                what = "no whole epoch in common" if math.isnan(speed) else images
                print(f"{method:8} {count} runs  {what}  {seconds:6.1f} s including start-up", flush=True)


if __name__ == "__main__":
    main()
