"""The tables of the page: runs beside the paper's figures, means over seeds, the density of each layer."""

import math
from dataclasses import dataclass

from optg.report.figures import Group
from optg.report.markup import compact, duration, is_number, percent, signed, text
from optg.report.palette import Look
from optg.report.plot import sample
from optg.report.runs import Run, all_settings, said


@dataclass(frozen=True)
class Column:
    head: str
    number: bool = True


def table(caption: str, columns: list[Column], rows: list[list[str]]) -> str:
    """Rows of ready HTML in a box that scrolls by itself. The first column stays in sight."""
    heads = "".join(f'<th scope="col"{" class=n" if c.number else ""}>{text(c.head)}</th>' for c in columns)
    body = []
    for first, *rest in rows:
        cells = "".join(f"<td{' class=n' if c.number else ''}>{cell}</td>" for c, cell in zip(columns[1:], rest))
        body.append(f'<tr><th scope="row"><span>{first}</span></th>{cells}</tr>')
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{text(caption)}"><table><thead><tr>{heads}</tr></thead>\n'
        f"<tbody>{chr(10).join(body)}</tbody></table></div>"
    )


def swatch(look: Look, line: bool = True, marker: bool = False) -> str:
    return f'<svg class="swatch" viewBox="0 0 22 11" aria-hidden="true">{sample(look, line, marker)}</svg>'


def comparison(group: Group) -> str:
    """All runs, the sparsest last, the best of each sparsity first."""
    columns = [Column("run", False), Column("accuracy, %")]
    if group.paper:
        columns += [Column("paper, %"), Column("difference")]
    columns += map(Column, ("sparsity, %", "parameters left", "FLOPs", "of dense, %", "epochs", "seed", "time"))
    order = sorted(range(len(group.runs)), key=lambda i: (group.runs[i].target, -accuracy(group.runs[i])))
    rows = []
    for i in order:
        run = group.runs[i]
        row = [f"{swatch(group.looks[i])}{named(run)}", percent(run.accuracy)]
        if group.paper:
            point = group.paper.at(run.method, run.target)
            both = point and run.finished and is_number(run.accuracy) and run.settings["epochs"] == group.paper.epochs
            row += [
                percent(point.accuracy if point else None),
                signed(accuracy(run) - point.accuracy if point and both else None),
            ]
        flops, dense = run.number("flops"), run.number("dense_flops")
        part = percent(flops / dense, 1) if flops is not None and dense else "–"
        row += [
            percent(run.sparsity),
            compact(run.number("nonzero")),
            compact(flops),
            part,
            str(run.settings["epochs"]) if run.finished else f"{run.epoch} of {run.settings['epochs']}",
            text(run.settings["seed"]),
        ]
        rows.append([*row, duration(run.number("seconds"))])
    return table(f"Runs of {group.name}", columns, rows)


def accuracy(run: Run) -> float:
    return run.accuracy if is_number(run.accuracy) else 0.0


def named(run: Run) -> str:
    """Its label, and beside it, where that stays in sight on a phone, whether it has ended."""
    return text(run.label) if run.finished else f'<span>{text(run.label)} <span class="flag">not ended</span></span>'


def over_seeds(group: Group) -> str:
    """Mean and deviation of runs that differ in their seed alone. Empty where no two do."""
    alike: dict[tuple[str, str], list[int]] = {}
    for i, run in enumerate(group.runs):
        if run.finished and is_number(run.accuracy):
            same = {key: value for key, value in all_settings(run).items() if key != "seed"}
            alike.setdefault((run.method, repr(same)), []).append(i)
    rows = []
    for members in alike.values():
        of_seed = {group.runs[i].settings["seed"]: accuracy(group.runs[i]) for i in reversed(members)}  # the first of each
        if len(of_seed) > 1:
            values = list(of_seed.values())
            mean = sum(values) / len(values)
            deviation = math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - 1))
            run = group.runs[members[0]]
            label = run.label.replace(f", {said('seed', run.settings['seed'])}", "").removesuffix(f", {run.name}")
            named = f"{swatch(group.methods[run.method])}{text(label)}"
            range_ = f"{percent(min(values))} to {percent(max(values))}"
            rows.append([named, percent(mean), f"± {percent(deviation)}", str(len(values)), range_])
    columns = [Column("runs", False), *map(Column, ("mean, %", "deviation", "seeds", "range, %"))]
    return table(f"Means over seeds of {group.name}", columns, rows) if rows else ""


def layer_table(group: Group) -> str:
    """Layers down, runs across."""
    shown = [i for i, kept in enumerate(group.densities) if kept]
    layers = list(dict.fromkeys(name for i in shown for name in group.densities[i]))
    columns = [Column("layer", False), *(Column(group.runs[i].label) for i in shown)]
    rows = [
        [f"{j}&ensp;{text(name)}", *(percent(group.densities[i].get(name)) for i in shown)] for j, name in enumerate(layers, 1)
    ]
    return table(f"Density of each layer of {group.name}, in %", columns, rows)
