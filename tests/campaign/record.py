"""The results of the campaign, under version control: `results/PART.json`, a list of entries for each part.

An entry adds up pieces that continue each other on the same day, at the same revision and on the same machine. A failure that
has been fixed is moved by hand from `failures` to `mended`, with the test that shows it.
"""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from optg.files import atomic_write

RESULTS = Path(__file__).parent / "results"
SAME = ("date", "revision", "hardware")  # in all pieces of an entry
Entry = dict[str, Any]


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
    PlannedPart("packed_compiled", "mutated packed files, compiled and run under sanitizers, against torch", 10**5, "compiled"),
    PlannedPart("packed_int8", "random int8 files, run under sanitizers, against the integer reference, bit by bit", 10**4),
    PlannedPart("random_networks", "random networks × instruction sets, against torch", 10**4),
    PlannedPart("many_calls", "calls of a compiled model; resident memory stays flat", 10**6),
    PlannedPart("soak", "seconds of train – kill – resume – export – predict", 8 * 3600, "seconds"),
)


class Record:
    """The entries of all parts, oldest first."""

    def __init__(self, folder: Path = RESULTS) -> None:
        self.folder = folder
        self.entries: dict[str, list[Entry]] = {
            part.name: json.loads(path.read_text()) for part in PLAN if (path := folder / f"{part.name}.json").exists()
        }

    def of(self, part: PlannedPart) -> list[Entry]:
        return self.entries.get(part.name, [])

    def add(self, name: str, piece: Entry) -> None:
        """Add a piece to the entry that it continues, or as a new entry."""
        entries = self.entries.setdefault(name, [])
        for entry in entries:
            if entry["next"] == piece["seed"] and all(entry[key] == piece[key] for key in SAME):
                entry["counts"] = dict(Counter(entry["counts"]) + Counter(piece["counts"]))
                entry["seconds"] = round(entry["seconds"] + piece["seconds"])
                entry["failures"] = [*entry["failures"], *piece["failures"]]
                entry |= {key: piece[key] for key in ("next", "total")}
                break
        else:
            entries.append(piece | {"seconds": round(piece["seconds"])})
        self.save(name)

    def merge(self, other: "Record") -> None:
        """Add what another copy of the source recorded, unless it is known."""
        for name, entries in other.entries.items():
            for entry in entries:
                if entry not in self.entries.get(name, []):
                    self.add(name, entry)

    def forget(self, names: Sequence[str]) -> None:
        for name in names:
            self.entries[name] = []
            self.save(name)

    def save(self, name: str) -> None:
        self.folder.mkdir(exist_ok=True)
        with atomic_write(self.folder / f"{name}.json") as partial:
            partial.write_text(json.dumps(self.entries[name], indent=1, ensure_ascii=False) + "\n")

    def counts(self, part: PlannedPart) -> Counter[str]:
        found: Counter[str] = Counter()
        for entry in self.of(part):
            found.update(entry["counts"])
            found["seconds"] += entry["seconds"]
        return found

    def next_seed(self, part: PlannedPart, first: int = 0) -> int:
        """Return the first case from `first` on that was not tried."""
        return max((entry["next"] for entry in self.of(part) if entry["seed"] >= first), default=first)

    def target(self, part: PlannedPart) -> int | None:
        """Return how many cases complete a part; None while that is unknown."""
        totals = [entry["total"] for entry in self.of(part) if entry["total"]]
        return part.target or (totals[-1] if totals else None)

    def share(self, part: PlannedPart) -> float:
        """Return how much of a part is done."""
        target = self.target(part)
        return min(1.0, self.counts(part)[part.unit] / target) if target else 0.0
