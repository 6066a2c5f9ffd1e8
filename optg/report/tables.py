"""The tables of the page: runs beside the paper's results, means over seeds, the density of each layer."""

import math
from dataclasses import dataclass

from optg.report.figures import RunGroup
from optg.report.markup import compact, duration, escape, is_number, percent, signed
from optg.report.plot import swatch
from optg.report.runs import RunRecord, all_settings, describe_setting


@dataclass(frozen=True)
class Column:
    head: str
    number: bool = True


def html_table(caption: str, columns: list[Column], rows: list[list[str]]) -> str:
    """Return a table in a box that scrolls sideways; the first column stays in view. Cells are HTML."""
    heads = "".join(f'<th scope="col"{" class=n" if c.number else ""}>{escape(c.head)}</th>' for c in columns)
    body = []
    for first, *rest in rows:
        cells = "".join(f"<td{' class=n' if c.number else ''}>{cell}</td>" for c, cell in zip(columns[1:], rest))
        body.append(f'<tr><th scope="row"><span>{first}</span></th>{cells}</tr>')
    table = f"<table><thead><tr>{heads}</tr></thead>\n<tbody>{chr(10).join(body)}</tbody></table>"
    return f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(caption)}">{table}</div>'


def comparison_table(group: RunGroup) -> str:
    """Return a row per run, by increasing sparsity and then by decreasing accuracy."""
    columns = [Column("run", False), Column("accuracy, %")]
    if group.paper:
        columns += [Column("paper, %"), Column("difference")]
    columns += map(Column, ("sparsity, %", "parameters left", "FLOPs", "of dense, %", "epochs", "seed", "time"))
    order = sorted(range(len(group.runs)), key=lambda i: (group.runs[i].target, -accuracy_or_zero(group.runs[i])))
    rows = []
    for i in order:
        run = group.runs[i]
        row = [f"{swatch(group.looks[i])}{run_name(run)}", percent(run.accuracy) if run.finished else "no result"]
        if group.paper:
            point = group.paper.at(run.method, run.target)
            comparable = point and run.finished and is_number(run.accuracy) and run.settings["epochs"] == group.paper.epochs
            row += [
                percent(point.accuracy if point else None),
                signed(accuracy_or_zero(run) - point.accuracy if point and comparable else None),
            ]
        flops, dense = run.number("flops"), run.number("dense_flops")
        part = percent(flops / dense, 1) if flops is not None and dense else "–"
        row += [
            percent(run.sparsity),
            compact(run.number("nonzero")),
            compact(flops),
            part,
            str(run.settings["epochs"]) if run.finished else f"{run.epoch} of {run.settings['epochs']}",
            escape(run.settings["seed"]),
        ]
        rows.append([*row, duration(run.number("seconds"))])
    return html_table(f"Runs of {group.name}", columns, rows)


def accuracy_or_zero(run: RunRecord) -> float:
    return run.accuracy if is_number(run.accuracy) else 0.0


def run_name(run: RunRecord) -> str:
    """Return the label, and a flag if the run is unfinished: in the first column, which stays in view on a phone."""
    return escape(run.label) if run.finished else f'<span>{escape(run.label)} <span class="flag">unfinished</span></span>'


def seed_table(group: RunGroup) -> str:
    """Return mean and deviation of runs that differ only in their seed, or an empty string if there are none."""
    alike: dict[tuple[str, str], list[int]] = {}
    for i, run in enumerate(group.runs):
        if run.finished and is_number(run.accuracy):
            same = {key: value for key, value in all_settings(run).items() if key != "seed"}
            alike.setdefault((run.method, repr(same)), []).append(i)
    rows = []
    for members in alike.values():
        of_seed = {
            group.runs[i].settings["seed"]: accuracy_or_zero(group.runs[i]) for i in reversed(members)
        }  # the first run of each seed
        if len(of_seed) > 1:
            values = list(of_seed.values())
            mean = sum(values) / len(values)
            deviation = math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - 1))
            run = group.runs[members[0]]
            label = run.label.replace(f", {describe_setting('seed', run.settings['seed'])}", "").removesuffix(f", {run.name}")
            named = f"{swatch(group.methods[run.method])}{escape(label)}"
            range_ = f"{percent(min(values))} to {percent(max(values))}"
            rows.append([named, percent(mean), f"± {percent(deviation)}", str(len(values)), range_])
    columns = [Column("runs", False), *map(Column, ("mean, %", "deviation", "seeds", "range, %"))]
    return html_table(f"Means over seeds of {group.name}", columns, rows) if rows else ""


def layer_table(group: RunGroup) -> str:
    """Return a row per layer and a column per run."""
    shown = [i for i, kept in enumerate(group.densities) if kept]
    layers = list(dict.fromkeys(name for i in shown for name in group.densities[i]))
    columns = [Column("layer", False), *(Column(group.runs[i].label) for i in shown)]
    rows = [
        [f"{j}&ensp;{escape(name)}", *(percent(group.densities[i].get(name)) for i in shown)]
        for j, name in enumerate(layers, 1)
    ]
    return html_table(f"Density of each layer of {group.name}, in %", columns, rows)
