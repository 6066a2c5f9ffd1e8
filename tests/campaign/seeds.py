"""Run one function for many seeds in forked children, so that a crash costs one seed and is counted.

A child is forked from a process that has imported torch. It reports every seed that it has finished. If it dies or hangs, the
seed it was working on is a failure, and another child continues with the next one. A child hangs if it computes for two minutes
or waits for half an hour.
"""

import argparse
import json
import os
import resource
import select
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

PER_CHILD = 2000  # seeds; a fork copies pages for some time after it
MOST_SECONDS, LONGEST_WAIT = 60.0, 1800.0  # of CPU time and of any time for one seed
MOST_MEMORY = 4 * 2**30  # bytes by which one seed may raise the peak
Case = Callable[[int], str]  # returns the outcome; any exception is a failure


class Seeds:
    """Counts the outcomes of a range of seeds."""

    def __init__(self, case: Case, count: int, seed: int, seconds: float) -> None:
        self.case, self.seed, self.next, self.last = case, seed, seed, seed + count
        self.began, self.end = time.monotonic(), time.monotonic() + seconds
        self.counts: Counter[str] = Counter(cases=0)
        self.failures: list[str] = []
        self.slowest, self.largest = 0.0, 0

    def run(self) -> None:
        while self.next < self.last and time.monotonic() < self.end:
            self.run_child(min(self.last, self.next + PER_CHILD))

    def run_child(self, last: int) -> None:
        reading, writing = os.pipe()
        if (child := os.fork()) == 0:
            os.close(reading)
            with os.fdopen(writing, "w", buffering=1) as reports:
                self.work(last, reports)
            os._exit(0)
        os.close(writing)
        with os.fdopen(reading, "rb", buffering=0) as reports:
            killed = self.listen(reports, child)
        _, status = os.waitpid(child, 0)
        if self.next < last and (killed or status or time.monotonic() < self.end):
            reason = "it hangs" if killed else f"status {os.waitstatus_to_exitcode(status)}"
            self.record({"seed": self.next, "failure": reason, "seconds": 0.0, "bytes": 0})

    def listen(self, reports: Any, child: int) -> bool:
        """Record the child's reports until it ends. Return whether it had to be killed."""
        pending, computed, heard = b"", cpu_seconds(child), time.monotonic()
        while True:
            if not select.select([reports], [], [], 5)[0]:
                busy, silent = cpu_seconds(child) - computed, time.monotonic() - heard
                if busy > 2 * MOST_SECONDS or silent > LONGEST_WAIT:
                    os.kill(child, signal.SIGKILL)
                    return True
                continue
            computed, heard = cpu_seconds(child), time.monotonic()
            if not (read := reports.read(65536)):
                return False
            *lines, pending = (pending + read).split(b"\n")
            for line in lines:
                self.record(json.loads(line))

    def work(self, last: int, reports: Any) -> None:
        """Work on the seeds in a child."""
        for seed in range(self.next, last):
            if time.monotonic() > self.end:
                return
            report: dict[str, Any] = {"seed": seed}
            memory, start = peak_memory(), time.process_time()
            try:
                report["outcome"] = self.case(seed)
            except BaseException as error:
                report["failure"] = f"{type(error).__name__}: {str(error)[:300]}"
            report["seconds"], report["bytes"] = time.process_time() - start, peak_memory() - memory
            if report["seconds"] > MOST_SECONDS:
                report["failure"] = f"{report['seconds']:.0f} seconds"
            if report["bytes"] > MOST_MEMORY:
                report["failure"] = f"{report['bytes']:,} bytes"
            reports.write(json.dumps(report) + "\n")

    def record(self, report: dict[str, Any]) -> None:
        self.next = report["seed"] + 1
        self.counts["cases"] += 1
        self.slowest, self.largest = max(self.slowest, report["seconds"]), max(self.largest, report["bytes"])
        if "failure" in report:
            self.failures.append(f"seed {report['seed']}: {report['failure']}")
        else:
            self.counts[report["outcome"]] += 1

    def line(self) -> str:
        """Return the result as JSON."""
        result = {
            "seed": self.seed,
            "next": self.next,
            "seconds": round(time.monotonic() - self.began, 1),
            "counts": dict(self.counts),
            "slowest_seconds": round(self.slowest, 2),
            "most_megabytes": round(self.largest / 2**20),
            "failures": self.failures,
        }
        return json.dumps(result)


def cpu_seconds(process: int) -> float:
    """Return the CPU time that a process has used."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def peak_memory() -> int:
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def parse_args(doc: str | None, *flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=doc)
    parser.add_argument("--count", type=int, default=10**9, help="number of seeds")
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--seconds", type=float, default=3600.0, help="begin no seed after this time")
    for flag in flags:
        parser.add_argument(f"--{flag}", action="store_true")
    return parser.parse_args()


def run_seeds(case: Case, count: int, seed: int, seconds: float) -> Seeds:
    """Run the seeds and print the result as one line of JSON."""
    seeds = Seeds(case, count, seed, seconds)
    try:
        seeds.run()
    finally:
        print(seeds.line(), flush=True)
    return seeds


def restart_under_sanitizers() -> None:
    """Start this program again with the runtimes of AddressSanitizer and UndefinedBehaviorSanitizer, unless they are loaded."""
    commands = [["cc", f"-print-file-name={name}"] for name in ("libasan.so", "libubsan.so")]
    runtime = [subprocess.run(command, capture_output=True, text=True).stdout.strip() for command in commands]
    if "LD_PRELOAD" in os.environ or not all(map(os.path.isabs, runtime)):
        return
    options = {"LD_PRELOAD": " ".join(runtime), "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1"}
    module = Path(sys.argv[0]).stem
    os.execve(sys.executable, [sys.executable, "-m", f"tests.campaign.{module}", *sys.argv[1:]], {**os.environ, **options})
