"""Run the campaign in pieces, record the results in tests/campaign/results, and write them into docs/reliability.md.

    python -m tests.campaign.driver --hours 2             continue where the last call stopped
    python -m tests.campaign.driver --parts faults flips  only some parts
    python -m tests.campaign.driver --first 5000000       other cases than those of another machine
    python -m tests.campaign.driver --merge FOLDER        add the results of another copy of the source
    python -m tests.campaign.driver --forget kills        drop the results of parts, after a change of the code
    python -m tests.campaign.driver --hours 0             only write the page again

Each part is a program of its own: `python -m tests.campaign.PART --count N --seed S --seconds T` tries the cases S, S + 1, …
and prints one line of JSON. Folders of runs are made in memory (/dev/shm) where there is such a place: a disk would take most
of the time.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

from optg.machine import cores, cpu_name, revision
from tests.campaign.page import write_page
from tests.campaign.record import PLAN, PlannedPart, Record

ROOT, MEMORY = Path(__file__).parents[2], Path("/dev/shm")
MOST_HOURS, PIECE = 2.0, 300.0  # seconds of a piece, so that all parts advance together


def run_piece(part: PlannedPart, record: Record, seconds: float, first: int = 0) -> dict[str, Any]:
    """Run a part for some time. A part that ends without a result has failed."""
    seed, target = record.next_seed(part, first), record.target(part)
    left = 10**9 if part.unit != "cases" or not target else max(1, target - record.counts(part)[part.unit])
    command = [sys.executable, "-m", f"tests.campaign.{part.name}", "--count", str(left), "--seed", str(seed)]
    facts = {"seed": seed, "date": date.today().isoformat(), "revision": described_revision(), "hardware": hardware()}
    began = time.monotonic()
    environment = {**os.environ, **({"TMPDIR": str(MEMORY)} if MEMORY.is_dir() else {})}
    done = subprocess.run(
        [*command, "--seconds", str(round(seconds))], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    try:
        result = parse(done.stdout)
    except (ValueError, LookupError):
        failure = f"ended with status {done.returncode}: {done.stderr[-1000:]}"
        result = {"next": seed, "total": None, "counts": {}, "failures": [failure]}
    return facts | {"seconds": time.monotonic() - began} | result


def parse(output: str) -> dict[str, Any]:
    """Return the result in the last line: where the part stopped, what it counted, and its failures."""
    result = json.loads(output.splitlines()[-1])
    return {key: result[key] for key in ("next", "seconds", "counts", "failures")} | {"total": result.get("total")}


def described_revision() -> str:
    """Return the short revision, with a + if the source differs from it."""
    changed = subprocess.run(["git", "-C", ROOT, "status", "--porcelain", "--", "optg"], capture_output=True, text=True).stdout
    return f"{(revision() or 'unknown')[:8]}{'+' if changed.strip() else ''}"


def hardware() -> str:
    return f"{cpu_name()}, {cores()} cores"


def run_for(seconds: float, parts: Sequence[PlannedPart], record: Record, first: int) -> None:
    """Run pieces until the time is over: always of the part that is least complete."""
    end, broken = time.monotonic() + seconds, set()
    while (left := end - time.monotonic()) > 30:
        open_parts = [part for part in parts if part.exists and part.name not in broken and record.share(part) < 1]
        if not open_parts:
            break
        part = min(open_parts, key=record.share)
        piece = run_piece(part, record, min(left, PIECE), first)
        if not piece["counts"].get("cases"):
            broken.add(part.name)
        record.add(part.name, piece)
        write_page(record)
        print(f"{part.name}: {record.share(part):.1%} done, {piece['counts']}, {len(piece['failures'])} failures", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hours", type=float, default=MOST_HOURS, help="at most 2")
    names = [part.name for part in PLAN]
    parser.add_argument("--parts", nargs="+", choices=names, default=names)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--forget", nargs="+", choices=names, default=[])
    parser.add_argument("--merge", type=Path, help="a folder like tests/campaign/results")
    args = parser.parse_args()
    record = Record()
    if args.merge:
        record.merge(Record(args.merge))
    elif args.forget:
        record.forget(args.forget)
    else:
        parts = [part for part in PLAN if part.name in args.parts]
        run_for(3600 * min(args.hours, MOST_HOURS), parts, record, args.first)
    write_page(record)


if __name__ == "__main__":
    main()
