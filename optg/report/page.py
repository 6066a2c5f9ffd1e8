"""The page: one HTML file that needs no network and no script."""

from importlib.resources import files

from optg.report import figures, scatter
from optg.report.commands import commands_section
from optg.report.figures import RunGroup
from optg.report.markup import escape, missing_note, plural, slug
from optg.report.palette import css_variables
from optg.report.plot import LegendEntry, Plot, inline_svg, name_or_count, swatch
from optg.report.runs import RunRecord
from optg.report.tables import comparison_table, layer_table, seed_table

POLICY = "default-src 'none'; style-src 'unsafe-inline'"  # the browser then refuses scripts and requests of any kind


class GroupPlots:
    """The plots of a group, by section of the page."""

    def __init__(self, group: RunGroup) -> None:
        self.group = group
        self.results = [scatter.against_sparsity(group), scatter.against_flops(group)]
        self.training = [f(group) for f in (figures.accuracy, figures.late_accuracy, figures.loss, figures.test_loss)]
        self.schedules = [figures.sparsity(group), figures.learning_rate(group), figures.score_rate(group)]
        self.cuts = [figures.removed(group), figures.revived(group)]
        self.layers = [figures.layer_density(group)]

    def all(self) -> list[Plot]:
        sections = (self.results, self.training, self.schedules, self.cuts, self.layers)
        return [plot for section in sections for plot in section if plot]


def render_page(groups: list[GroupPlots], title: str) -> str:
    runs = [run for plots in groups for run in plots.group.runs]
    contents = "".join(f'<a href="#{anchor(i, g.group)}">{escape(g.group.name)}</a>' for i, g in enumerate(groups))
    nav = f'<nav aria-label="Contents">{contents}<a href="#commands">Commands and versions</a></nav>'
    body = "\n".join(group_section(i, plots) for i, plots in enumerate(groups))
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<title>{escape(title)}</title>
<style>
{css_variables()}
{(files("optg.report") / "page.css").read_text()}</style>
</head>
<body>
<header>
<h1>{escape(title)}</h1>
<p>{introduction(runs, groups)}</p>
{nav}
</header>
<main>
{body}
{commands_section([plots.group for plots in groups])}
</main>
</body>
</html>
"""


def introduction(runs: list[RunRecord], groups: list[GroupPlots]) -> str:
    names = escape(", ".join(plots.group.name for plots in groups))
    said = f"{plural(len(runs), 'run')} of {plural(len({run.method for run in runs}), 'method')}: {names}."
    unfinished = sum(not run.finished for run in runs)
    if unfinished:
        verb = "is" if unfinished == 1 else "are"
        said += f" {plural(unfinished, 'run')} {verb} unfinished and shown up to the last recorded epoch."
    return said


def anchor(i: int, group: RunGroup) -> str:
    return f"{i + 1}-{slug(group.name)}"


def group_section(i: int, plots: GroupPlots) -> str:
    group = plots.group
    parts = [
        f'<section id="{anchor(i, group)}">',
        f"<h2>{escape(group.name)}</h2>",
        comparison_table(group),
        table_notes(group),
    ]
    if seeds := seed_table(group):
        parts += ["<h3>Mean over seeds</h3>", seeds]
    parts += plot_section(
        "Accuracy against sparsity and FLOPs", plots.results, "No finished run has an accuracy.", "figures large"
    )
    if not any(run.files for run in group.runs):
        note = "Only the summaries of these runs are known. Curves, schedules, cuts and layers need the folders of the runs."
        return "\n".join([*parts, missing_note(note), "</section>"])
    parts += plot_section("Training", plots.training, "No epoch has been recorded yet.")
    if any(plots.schedules):
        parts += plot_section("Schedules", plots.schedules, "")
        if not plots.schedules[-1]:
            parts.append(
                missing_note(
                    "No learning rate of mask scores was recorded. Only methods that learn scores, such as OptG, have one."
                )
            )
    parts += plot_section("Removed and revived weights", plots.cuts, "Removed and revived weights were not recorded.")
    parts += plot_section(
        "Layers", plots.layers, "The density of layers was not recorded, and there are no weights to count it in."
    )
    if any(group.densities):
        parts.append(f"<details><summary>Density in numbers, %</summary>{layer_table(group)}</details>")
    return "\n".join([*parts, "</section>"])


def table_notes(group: RunGroup) -> str:
    notes = ["Accuracy is measured on the test images after the last epoch."]
    if group.paper:
        notes.append(
            f"Paper: {escape(group.paper.name)} of the OptG paper, {group.paper.epochs} epochs. The difference, in percentage "
            "points, is given for runs of the same length."
        )
        notes += [escape(note) for note in group.paper.notes]
    return f'<p class="note">{" ".join(notes)}</p>'


def plot_section(title: str, shown: list[Plot | None], otherwise: str, grid: str = "figures") -> list[str]:
    """Return a heading with its plots and their legend, or with a sentence that says why there are none."""
    plots = [plot for plot in shown if plot]
    if not plots:
        return [f"<h3>{title}</h3>", missing_note(otherwise)]
    drawn = [f"<figure><figcaption>{escape(p.title)}</figcaption>{inline_svg(p)}</figure>" for p in plots]
    entries = dict.fromkeys(entry for plot in plots for entry in plot.legend)
    parts = [f"<h3>{title}</h3>", html_legend(list(entries)), f'<div class="{grid}">{"".join(drawn)}</div>']
    if absent := [label for label in plots[0].missing if all(label in plot.missing for plot in plots)]:
        parts.append(missing_note(escape(f"Not shown because unfinished or not recorded: {name_or_count(absent)}.")))
    return parts + [missing_note(escape(remark)) for remark in dict.fromkeys(plot.remark for plot in plots) if remark]


def html_legend(entries: list[LegendEntry]) -> str:
    items = "".join(f"<li>{swatch(look, line, marker)}{escape(label)}</li>" for label, look, line, marker in entries)
    return f'<ul class="legend">{items}</ul>'
