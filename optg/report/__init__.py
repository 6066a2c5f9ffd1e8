"""A page that shows runs to others: tables, figures and commands in one HTML file, and the figures as files beside it.

Everything on it is read from what the runs recorded. The same runs make the same bytes.
"""

from collections.abc import Iterable
from pathlib import Path

from optg.report.figures import make_group
from optg.report.markup import slug
from optg.report.page import Sections, page
from optg.report.plot import MADE, alone
from optg.report.runs import group, read_all


def write(runs: Iterable[Path], output: Path, title: str) -> Path:
    """Write index.html and figures/ into a folder. Returns the page's path."""
    sections = [Sections(make_group(*where, members)) for where, members in group(read_all(runs)).items()]
    files, taken = dict[str, str](), dict[str, int]()
    for section in sections:
        name = slug(section.group.name)
        taken[name] = taken.get(name, 0) + 1
        prefix = name if taken[name] == 1 else f"{name}-{taken[name]}"
        files |= {f"{prefix}-{figure.name}.svg": alone(figure) for figure in section.all()}
    made = page(sections, title)
    if output.is_file():
        raise ValueError(f"{output} is a file; give a folder for the page and its figures with --output")
    folder = output / "figures"
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.svg"):
        if old.name not in files and old.read_text(errors="replace").startswith(MADE):
            old.unlink()  # of a report that this one replaces
    for file, text in files.items():
        (folder / file).write_text(text, encoding="utf-8")
    (output / "index.html").write_text(made, encoding="utf-8")
    return output / "index.html"
