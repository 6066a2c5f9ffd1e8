"""Images a second of whole `optg train` epochs, data included: alone, and with several runs sharing one GPU.

    python benchmarks/throughput.py --runs 1 2 4 8 --folder DATA

Each run is a process of its own. Counted are the epochs in which all of them train: those after the last one has compiled,
until the first one ends. With --mps they share the GPU through NVIDIA's MPS.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from optg.experiments.runner import multi_process_service


def train(folder: Path, options: list[str], count: int) -> tuple[float, float]:
    """Images a second of all runs together, and seconds until the last had ended."""
    started, processes = time.time(), []
    for i in range(count):
        command = [sys.executable, "-m", "optg", "train", *options, "--seed", str(i), "--output", str(folder / str(i))]
        processes.append(subprocess.Popen(command, stdout=subprocess.DEVNULL))
    ends: list[list[tuple[float, float]]] = [[] for _ in processes]  # of each run's epochs: time, images a second
    while any(process.poll() is None for process in processes):
        for i, seen in enumerate(ends):
            path = folder / str(i) / "metrics.jsonl"
            rows = path.read_text().splitlines() if path.exists() else []
            seen += [(time.time(), json.loads(row)["images_per_second"]) for row in rows[len(seen) :]]
        time.sleep(0.05)
    if any(process.returncode for process in processes):
        raise SystemExit("a run has failed")
    first, last = max(seen[0][0] for seen in ends), min(seen[-1][0] for seen in ends)
    speeds = [[speed for at, speed in seen[1:] if first < at <= last] or [seen[-1][1]] for seen in ends]
    return sum(sum(s) / len(s) for s in speeds), time.time() - started


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
                print(f"{method:8} {count} runs  {speed:9,.0f} images/s together  {seconds:6.1f} s with start", flush=True)


if __name__ == "__main__":
    main()
