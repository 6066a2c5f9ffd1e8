"""`optg report`: tables, figures and commands of runs on one HTML page, with the figures in files beside it.

Everything is read from the files of the runs. The same runs give the same bytes.
"""

from collections.abc import Iterable
from pathlib import Path

from optg.files import atomic_file, is_real_file
from optg.training.errors import DamagedFile
from optg.training.recipe import RecipeError


def write(runs: Iterable[Path], output: Path, title: str) -> Path:
    """Write index.html and figures/ into a folder, and return the path of the page.

    Raise if some runs are damaged; if others are intact, the page shows these and is written first.
    """
    # Imported here because matplotlib is slow to import, and parts of this package are used without it.
    from optg.report.figures import make_run_group
    from optg.report.markup import plural, slug
    from optg.report.page import GroupPlots, render_page
    from optg.report.plot import FILE_HEADER, file_svg
    from optg.report.runs import group_runs, read_runs

    damaged: list[RecipeError | DamagedFile] = []
    intact = read_runs(runs, damaged)
    groups = [GroupPlots(make_run_group(*task, members)) for task, members in group_runs(intact).items()]
    files, taken = dict[str, str](), dict[str, int]()
    for plots in groups:
        name = slug(plots.group.name)
        taken[name] = taken.get(name, 0) + 1
        prefix = name if taken[name] == 1 else f"{name}-{taken[name]}"
        files |= {f"{prefix}-{plot.name}.svg": file_svg(plot) for plot in plots.all()}
    page = render_page(groups, title)
    if output.is_file():
        raise ValueError(f"{output} is a file; give a folder for the page and its figures with --output")
    folder = output / "figures"
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.svg"):
        if old.name not in files and is_real_file(old) and old.read_text(errors="replace").startswith(FILE_HEADER):
            old.unlink()  # from an earlier report
    for file, text in files.items():
        write_text(folder / file, text)
    write_text(output / "index.html", page)
    if damaged:
        count, reasons = plural(len(damaged), "damaged run"), "; ".join(map(str, damaged))
        raise DamagedFile(f"{output / 'index.html'} leaves out {count}: {reasons}")
    return output / "index.html"


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically. A link in its place is replaced, not followed."""
    with atomic_file(path) as file:
        file.write(text.encode())
