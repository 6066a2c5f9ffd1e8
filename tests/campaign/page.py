"""Write the recorded results into docs/reliability.md: a table, the counts of each part, and the failures."""

from collections.abc import Sequence
from pathlib import Path

from optg.files import atomic_write
from tests.campaign.record import PLAN, Entry, Record

PAGE = Path(__file__).parents[2] / "docs" / "reliability.md"
BEGIN, END = "<!-- campaign: written by `make campaign` -->", "<!-- end of campaign -->"
HEAD = ("part", "done", "of", "failures", "cases", "revisions", "dates")


def table(record: Record) -> str:
    """Return the recorded results as a table, and the failures as a list."""
    rows = [f"| {' | '.join(HEAD)} |", "| --- | ---: | ---: | ---: | --- | --- | --- |"]
    for part in PLAN:
        entries, target = record.of(part), record.target(part)
        cells = [f"`{part.name}`: {part.what}", "not run", f"{target:,}" if target else "all", *["–"] * 4]
        if entries:
            cells[1] = f"{record.counts(part)[part.unit]:,}"
            cells[3] = failures_of(entries)
            cells[4:] = seeds(entries), span(entries, "revision"), span(entries, "date")
        rows.append(f"| {' | '.join(cells)} |")
    machines = dict.fromkeys(entry["hardware"] for part in PLAN for entry in record.of(part))
    lines = [*rows, "", f"Hardware: {'; '.join(machines) or '–'}.", "", *detail(record), ""]
    lines += listed(record, "failures", "Open failures") or ["No failure is open."]
    return "\n".join([*lines, *listed(record, "mended", "Fixed")])


def failures_of(entries: Sequence[Entry]) -> str:
    """Return the number of open failures, and of those that are fixed."""
    failures, mended = (sum(len(entry.get(key, ())) for entry in entries) for key in ("failures", "mended"))
    return f"{failures} ({mended} fixed)" if mended else str(failures)


def seeds(entries: Sequence[Entry]) -> str:
    """Return the numbers of the cases as ranges."""
    ranges: list[list[int]] = []
    for first, end in sorted((entry["seed"], entry["next"]) for entry in entries):
        if ranges and first <= ranges[-1][1]:
            ranges[-1][1] = max(end, ranges[-1][1])
        else:
            ranges.append([first, end])
    return ", ".join(f"{first:,} – {end - 1:,}" for first, end in ranges)


def span(entries: Sequence[Entry], key: str) -> str:
    """Return the first and the last of some values."""
    return " – ".join(dict.fromkeys([entries[0][key], entries[-1][key]]))


def detail(record: Record) -> list[str]:
    """Return one line of counts per part that has any."""
    found = []
    for part in PLAN:
        counts = {key: value for key, value in sorted(record.counts(part).items()) if key not in (part.unit, "seconds")}
        if counts:
            found.append(f"- `{part.name}`: {', '.join(f'{key} {value:,}' for key, value in counts.items())}")
    return found


def listed(record: Record, key: str, title: str) -> list[str]:
    """Return the failures of all parts as a list, shortened."""
    found = [f"- `{part.name}`: {text}" for part in PLAN for entry in record.of(part) for text in entry.get(key, ())]
    lines = [" ".join(line.split())[:300] for line in found[:20]]
    more = [f"- and {len(found) - 20} more"] if len(found) > 20 else []
    return ["", f"{title}:", "", *lines, *more] if found else []


def write_page(record: Record) -> None:
    """Replace the part of the page between the two marks."""
    text = PAGE.read_text()
    before, after = text[: text.index(BEGIN)], text[text.index(END) :]
    with atomic_write(PAGE) as partial:
        partial.write_text(f"{before}{BEGIN}\n{table(record)}\n{after}")
