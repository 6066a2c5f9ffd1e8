"""Run the campaign in pieces, remember the results, and write them into docs/reliability.md.

    python -m tests.campaign.driver --hours 2             continue where the last call stopped
    python -m tests.campaign.driver --parts faults flips  only some parts
    python -m tests.campaign.driver --forget kills        drop the results of parts, after a change of the code
    python -m tests.campaign.driver --hours 0             only write the table again

Each part is a program of its own: `python -m tests.campaign.PART --count N --seed S --seconds T` tries the cases S, S + 1, …
and prints one line of JSON. The results of all pieces are kept in campaign/state.json, which is not under version control.
"""

import argparse
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from optg.files import atomic_write
from optg.machine import cores, cpu_name, revision

ROOT = Path(__file__).parents[2]
STATE, PAGE = ROOT / "campaign" / "state.json", ROOT / "docs" / "reliability.md"
BEGIN, END = "<!-- campaign: written by `make campaign` -->", "<!-- end of campaign -->"
MOST_HOURS, PIECE = 2.0, 300.0  # seconds of a piece, so that all parts advance together


@dataclass(frozen=True)
class PlannedPart:
    """A part, what it does, and when it is complete."""

    name: str
    what: str
    target: int | None  # None: every case of the enumeration
    unit: str = "cases"  # the count that the target is compared with

    @property
    def exists(self) -> bool:
        return find_spec(f"tests.campaign.{self.name}") is not None


PLAN = (
    PlannedPart("faults", "every file-system call of save, resume and finish × every fault that applies × 3 methods", None),
    PlannedPart("kills", "kills at random moments, over all methods; final bytes compared", 1000, "kills"),
    PlannedPart("ranks", "kills of one of two processes, DDP and FSDP2; final bytes compared", 200, "kills"),
    PlannedPart("flips", "a bit flipped in every 64th byte of every file of a run folder", None),
    PlannedPart("packed_mutations", "structured mutations of packed files, under sanitizers", 10**6),
    PlannedPart("packed_compiled", "mutated packed files, compiled and run", 10**5),
    PlannedPart("random_networks", "random networks × instruction sets, against torch", 10**4),
    PlannedPart("many_calls", "calls of a compiled model; resident memory stays flat", 10**6),
    PlannedPart("soak", "seconds of train – kill – resume – export – predict", 8 * 3600, "seconds"),
)


class State:
    """The results of all pieces so far, oldest first."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.pieces: list[dict[str, Any]] = json.loads(path.read_text())["pieces"] if path.exists() else []

    def of(self, part: PlannedPart) -> list[dict[str, Any]]:
        return [piece for piece in self.pieces if piece["part"] == part.name]

    def add(self, piece: dict[str, Any]) -> None:
        self.pieces.append(piece)
        self.save()

    def forget(self, names: Sequence[str]) -> None:
        self.pieces = [piece for piece in self.pieces if piece["part"] not in names]
        self.save()

    def save(self) -> None:
        self.path.parent.mkdir(exist_ok=True)
        with atomic_write(self.path) as partial:
            partial.write_text(json.dumps({"pieces": self.pieces}, indent=1) + "\n")

    def counts(self, part: PlannedPart) -> Counter[str]:
        found: Counter[str] = Counter()
        for piece in self.of(part):
            found.update(piece["counts"])
            found["seconds"] += round(piece["seconds"])
        return found

    def next_seed(self, part: PlannedPart) -> int:
        return max((piece["next"] for piece in self.of(part)), default=0)

    def target(self, part: PlannedPart) -> int | None:
        """Return how many cases complete a part; None while that is unknown."""
        totals = [piece["total"] for piece in self.of(part) if piece["total"]]
        return part.target or (totals[-1] if totals else None)

    def share(self, part: PlannedPart) -> float:
        """Return how much of a part is done."""
        target = self.target(part)
        return min(1.0, self.counts(part)[part.unit] / target) if target else 0.0


def run_piece(part: PlannedPart, state: State, seconds: float) -> dict[str, Any]:
    """Run a part for some time. A part that ends without a result has failed."""
    seed, target = state.next_seed(part), state.target(part)
    left = 10**9 if part.unit == "seconds" or not target else max(1, target - state.counts(part)[part.unit])
    command = [sys.executable, "-m", f"tests.campaign.{part.name}", "--count", str(left), "--seed", str(seed)]
    facts = {"part": part.name, "seed": seed, "date": date.today().isoformat(), "revision": described_revision()}
    began = time.monotonic()
    done = subprocess.run([*command, "--seconds", str(round(seconds))], cwd=ROOT, capture_output=True, text=True)
    try:
        result = parse(done.stdout)
    except (ValueError, LookupError):
        result = {
            "next": seed,
            "total": None,
            "counts": {},
            "failures": [f"ended with status {done.returncode}: {done.stderr[-1000:]}"],
        }
    return facts | {"hardware": hardware(), "seconds": time.monotonic() - began} | result


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


def run_for(seconds: float, parts: Sequence[PlannedPart], state: State) -> None:
    """Run pieces until the time is over: always of the part that is least complete."""
    end, broken = time.monotonic() + seconds, set()
    while (left := end - time.monotonic()) > 30:
        open_parts = [part for part in parts if part.exists and part.name not in broken and state.share(part) < 1]
        if not open_parts:
            break
        part = min(open_parts, key=state.share)
        piece = run_piece(part, state, min(left, PIECE))
        if not piece["counts"].get("cases"):
            broken.add(part.name)
        state.add(piece)
        write_page(state)
        print(f"{part.name}: {state.share(part):.1%} done, {piece['counts']}, {len(piece['failures'])} failures", flush=True)


def table(state: State) -> str:
    """Return the recorded results as a table, and the failures as a list."""
    rows = ["| part | done | of | failures | seeds | revision | date |", "| --- | ---: | ---: | ---: | --- | --- | --- |"]
    failures, machines = [], {}
    for part in PLAN:
        pieces, counts, target = state.of(part), state.counts(part), state.target(part)
        failures += [f"- `{part.name}`: {failure}" for piece in pieces for failure in piece["failures"]]
        machines |= {piece["hardware"]: None for piece in pieces}
        number = sum(len(piece["failures"]) for piece in pieces) if pieces else "–"
        seeds = f"0 – {state.next_seed(part) - 1:,}" if state.next_seed(part) else "–"
        spans = [ends([piece[key] for piece in pieces]) for key in ("revision", "date")]
        done = f"{counts[part.unit]:,}" if pieces else "not run"
        wanted = f"{target:,}" if target else "all"
        rows.append(f"| `{part.name}`: {part.what} | {done} | {wanted} | {number} | {seeds} | {spans[0]} | {spans[1]} |")
    lines = [*rows, "", f"Hardware: {'; '.join(machines) or '–'}.", "", *detail(state)]
    return "\n".join([*lines, "", "Failures:" if failures else "No failure is open.", "", *shortened(failures)]).rstrip()


def detail(state: State) -> list[str]:
    """Return one line of counts per part that has any."""
    found = []
    for part in PLAN:
        counts = {key: value for key, value in sorted(state.counts(part).items()) if key not in ("cases", "seconds")}
        if counts:
            found.append(f"- `{part.name}`: {', '.join(f'{key} {value:,}' for key, value in counts.items())}")
    return found


def ends(values: Sequence[str]) -> str:
    """Return the first and the last of some values."""
    return " – ".join(dict.fromkeys([values[0], values[-1]])) if values else "–"


def shortened(failures: Sequence[str]) -> list[str]:
    lines = [" ".join(failure.split())[:300] for failure in failures[:20]]
    return [*lines, f"- and {len(failures) - 20} more"] if len(failures) > 20 else lines


def write_page(state: State) -> None:
    """Replace the part of the page between the two marks."""
    text = PAGE.read_text()
    before, after = text[: text.index(BEGIN)], text[text.index(END) :]
    with atomic_write(PAGE) as partial:
        partial.write_text(f"{before}{BEGIN}\n{table(state)}\n{after}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hours", type=float, default=MOST_HOURS, help="at most 2")
    names = [part.name for part in PLAN]
    parser.add_argument("--parts", nargs="+", choices=names, default=names)
    parser.add_argument("--forget", nargs="+", choices=names, default=[])
    args = parser.parse_args()
    state = State(STATE)
    if args.forget:
        state.forget(args.forget)
    else:
        run_for(3600 * min(args.hours, MOST_HOURS), [part for part in PLAN if part.name in args.parts], state)
    write_page(state)


if __name__ == "__main__":
    main()
