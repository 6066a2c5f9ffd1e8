"""The page: one HTML file that needs nothing else, neither a network nor a script."""

from importlib.resources import files

from optg.report import figures, scatter
from optg.report.commands import commands
from optg.report.figures import Group
from optg.report.markup import counted, missing, slug, text
from optg.report.palette import LINE, PAGE, PANEL, QUIET, TEXT, style
from optg.report.plot import Entry, Figure, inline, named
from optg.report.runs import Run
from optg.report.tables import comparison, layer_table, over_seeds, swatch

POLICY = "default-src 'none'; style-src 'unsafe-inline'"  # a browser then refuses scripts and requests of any kind


class Sections:
    """The figures of a group by the part of the page that they stand in."""

    def __init__(self, group: Group) -> None:
        self.group = group
        self.results = [scatter.against_sparsity(group), scatter.against_flops(group)]
        self.training = [f(group) for f in (figures.accuracy, figures.late_accuracy, figures.loss, figures.test_loss)]
        self.schedules = [figures.sparsity(group), figures.rate(group), figures.mask_rate(group)]
        self.cuts = [figures.removed(group), figures.revived(group)]
        self.layers = [figures.layer_density(group)]

    def all(self) -> list[Figure]:
        every = (self.results, self.training, self.schedules, self.cuts, self.layers)
        return [figure for part in every for figure in part if figure]


def page(sections: list[Sections], title: str) -> str:
    runs = [run for section in sections for run in section.group.runs]
    contents = "".join(f'<a href="#{anchor(i, s.group)}">{text(s.group.name)}</a>' for i, s in enumerate(sections))
    nav = f'<nav aria-label="Contents">{contents}<a href="#commands">Commands and versions</a></nav>'
    body = "\n".join(group_part(i, section) for i, section in enumerate(sections))
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<title>{text(title)}</title>
<style>
{variables()}
{(files("optg.report") / "page.css").read_text()}{style()}
</style>
</head>
<body>
<header>
<h1>{text(title)}</h1>
<p>{lead(runs, sections)}</p>
{nav}
</header>
<main>
{body}
{commands([section.group for section in sections])}
</main>
</body>
</html>
"""


def variables() -> str:
    """The colours of the page itself."""
    pairs = {"text": TEXT, "quiet": QUIET, "line": LINE, "page": PAGE, "panel": PANEL}
    light, dark = (";".join(f"--{name}:{pair[i]}" for name, pair in pairs.items()) for i in (0, 1))
    return f":root{{{light}}}\n@media (prefers-color-scheme:dark){{:root{{{dark}}}}}"


def lead(runs: list[Run], sections: list[Sections]) -> str:
    unfinished = sum(not run.finished for run in runs)
    methods = len({run.method for run in runs})
    said = f"{counted(len(runs), 'run')} of {counted(methods, 'method')}: {text(', '.join(s.group.name for s in sections))}."
    if unfinished == 1:
        said += " One of them has not ended, and is shown as far as it got."
    elif unfinished:
        said += f" {unfinished} of them have not ended, and are shown as far as they got."
    return said


def anchor(i: int, group: Group) -> str:
    return f"{i + 1}-{slug(group.name)}"


def group_part(i: int, section: Sections) -> str:
    group = section.group
    parts = [f'<section id="{anchor(i, group)}">', f"<h2>{text(group.name)}</h2>", comparison(group), under_table(group)]
    if seeds := over_seeds(group):
        parts += ["<h3>Over seeds</h3>", seeds]
    parts += part(
        "Accuracy against sparsity and FLOPs", section.results, "No run that ended has an accuracy to show.", "figures large"
    )
    if not any(run.folder for run in group.runs):
        known = "These runs are known by their summaries alone; curves, schedules, cuts and layers are in the folders of runs."
        return "\n".join([*parts, missing(known), "</section>"])
    parts += part("Training", section.training, "No epoch was recorded yet.")
    if any(section.schedules):
        parts += part("Schedules", section.schedules, "")
        if not section.schedules[-1]:
            parts.append(
                missing("No learning rate of mask scores was recorded; methods that learn scores, as OptG does, have one.")
            )
    parts += part(
        "Removed and revived weights", section.cuts, "The weights that each cut removed and revived were not recorded."
    )
    parts += part(
        "Layers", section.layers, "Densities of layers were not recorded, and there are no weights to count them from."
    )
    if any(group.densities):
        parts.append(f"<details><summary>Densities in numbers, %</summary>{layer_table(group)}</details>")
    return "\n".join([*parts, "</section>"])


def under_table(group: Group) -> str:
    notes = ["Accuracy is that of the last epoch, on the test images."]
    if group.paper:
        notes.append(
            f"Paper: {text(group.paper.name)} of the OptG paper, {group.paper.epochs} epochs; the difference, in points, is of "
            "runs that are as long."
        )
        notes += [text(note) for note in group.paper.notes]
    return f'<p class="note">{" ".join(notes)}</p>'


def part(title: str, shown: list[Figure | None], instead: str, grid: str = "figures") -> list[str]:
    """A heading with its figures and their legend, or a line that says why there are none."""
    made = [figure for figure in shown if figure]
    if not made:
        return [f"<h3>{title}</h3>", missing(instead)]
    drawn = [f"<figure><figcaption>{text(f.title)}</figcaption>{inline(f)}</figure>" for f in made]
    entries = dict.fromkeys(entry for figure in made for entry in figure.legend)
    parts = [f"<h3>{title}</h3>", legend(list(entries)), f'<div class="{grid}">{"".join(drawn)}</div>']
    if absent := [label for label in made[0].missing if all(label in figure.missing for figure in made)]:
        parts.append(missing(text(f"Not shown, since not ended or not recorded: {named(absent)}.")))
    return parts + [missing(text(remark)) for remark in dict.fromkeys(figure.remark for figure in made) if remark]


def legend(entries: list[Entry]) -> str:
    items = "".join(f"<li>{swatch(look, line, marker)}{text(label)}</li>" for label, look, line, marker in entries)
    return f'<ul class="legend">{items}</ul>'
