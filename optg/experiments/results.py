"""RESULTS.md from results/*.jsonl: every figure on the page is read from the summary of a run, none is typed."""

from pathlib import Path
from typing import Any

from optg.experiments import declaration, record
from optg.experiments.declaration import Choice, Experiment
from optg.experiments.table import COLUMNS, Line, lines, number, texts, used
from optg.training import recipe as recipes

HEAD = """# Results

Made by `optg reproduce --results RESULTS.md` from `results/*.jsonl`, the `summary.json` of each run; not edited by hand.
Accuracy (`ours`, `paper`) is top-1 in % on the test images after the last epoch, never the best epoch; ± is the standard
deviation over seeds. `difference` is ours minus the paper's. FLOPs are multiply-adds of one image with the zeros left out.
Seconds are of training, as the run ran: runs that share a GPU take longer each, and less together.
"""


def write(path: Path) -> None:
    """The page, from the records in the folder `results` beside it."""
    folder = path.parent / "results"
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; expected it beside {path.name}, with the records of runs (*.jsonl)")
    path.write_text(page(folder))


def page(folder: Path) -> str:
    known: record.Summaries = {}
    for file in sorted(folder.glob("*.jsonl")):
        for row in record.read(file):
            before = known.setdefault(declaration.key_of(row), row)
            if before["accuracy"] != row["accuracy"]:
                raise ValueError(
                    f"{file} has a run that is there already, with accuracy {before['accuracy']} instead of {row['accuracy']}; "
                    f"expected each once: {row['command']}"
                )
    parts, missing, left = [HEAD], [], dict(known)
    for name in declaration.names():
        places = [section(name, place, known, left) for place in declaration.contents()[name].get("on", {})]
        parts += [text for text in places if text]
        if not any(places) and places:
            missing.append(f"`{name}`")
    if left:
        parts.append(others(list(left.values())))
    if missing:
        parts.append(f"Not run yet: {', '.join(missing)}.\n")
    return "\n".join(parts)


def section(name: str, place: str, known: record.Summaries, left: record.Summaries) -> str:
    """One experiment at one place, or nothing where no run of it is there. Takes the runs that it shows out of `left`."""
    experiment = declaration.load(name, Choice(on=(place,), asked=True))
    found = [line for line in lines(experiment, known) if line.summaries]
    for line in found:
        for summary in line.summaries:
            left.pop(declaration.key_of(summary), None)
    if not found:
        return ""
    rows = [texts(line) for line in found]
    keep = used(rows)
    parts = [
        f"## {experiment.title}, {place}\n",
        f"`optg reproduce {name} --on {place}`\n",
        markdown([COLUMNS[i] for i in keep], [[row[i] for i in keep] for row in rows]),
        provenance(experiment, found),
        *(f"- {note}" for note in experiment.notes),
        commands([f"optg {' '.join(run.arguments)}" for line in found for run in behind(line)]),
    ]
    return "\n".join(parts)


def provenance(experiment: Experiment, found: list[Line]) -> str:
    summaries = [summary for line in found for summary in line.summaries]
    wanted = declaration.load(experiment.name, Choice(on=(found[0].cell.place,))).runs
    made = sorted({f"{s['hardware']}, torch {s['versions']['torch']}" for s in summaries})
    total = sum(s["seconds"] for s in {declaration.key_of(s): s for s in summaries}.values())
    return f"- {'; '.join(made)}; {total:,.0f} s of training in the runs above; {len(wanted)} runs make the whole experiment."


def others(summaries: list[dict[str, Any]]) -> str:
    """Runs that stand in no table: of no experiment, or one of several settings of which another came nearer."""
    rows, said = [], []
    for s in summaries:
        changes, command = origin(s)
        settings = s["settings"]
        what = f"{settings['model']} on {settings['data']}, {settings['epochs']} epochs"
        figures = [f"{100 * s['accuracy']:.2f}", f"{100 * s['sparsity']:.2f} %", number(s["flops"] / 1e6)]
        rows.append([what, s["method"], changes, *figures, str(settings["seed"]), f"{s['seconds']:,.0f}", s["hardware"]])
        said.append(command)
    head = ["what", "method", "with", "ours", "sparsity", "MFLOPs", "seed", "seconds", "hardware"]
    return "\n".join(["## Other runs\n", markdown(head, rows), commands(said)])


def origin(summary: dict[str, Any]) -> tuple[str, str]:
    """What a run has changed of its recipe, and what trains the same again, now: recipes may have changed since."""
    if summary["recipe"] not in recipes.names():
        return "", summary["command"]
    settings = {key: value for key, value in summary["settings"].items() if key not in recipes.EXECUTION_SETTINGS}
    try:
        run = declaration.make_run(summary["recipe"], summary["method"], settings, summary["options"])
        changes = ", ".join(f"{key} {value}" for of in run.changes for key, value in of.items())
        return changes, f"optg {' '.join(run.arguments)}"
    except ValueError:  # a method, a setting or an option that is no more
        return "", summary["command"]


def markdown(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *rows]) + "\n"


def behind(line: Line) -> list[declaration.Run]:
    """The runs that a line's figure is of."""
    keys = {declaration.key_of(summary) for summary in line.summaries}
    return [run for run in line.cell.runs if run.key in keys]


def commands(lines: list[str]) -> str:
    """Each once, folded away."""
    unique = list(dict.fromkeys(lines))
    return "\n".join(["", "<details><summary>Commands</summary>", "", "```", *unique, "```", "", "</details>", ""])
