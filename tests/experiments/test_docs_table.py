"""The list of experiments in docs/experiments.md is generated from contents.toml. Run this file as a script to update it."""

import re
from pathlib import Path

from optg.experiments.tables import all_experiments

PAGE = Path(__file__).parents[2] / "docs" / "experiments.md"


def updated_page() -> str:
    rows = [["name", "title", "dataset", "runs", "epochs"], ["---"] * 5]
    for name, title, dataset, runs in all_experiments():
        epochs = sum(run.plan.recipe.epochs for run in runs)
        rows.append([name and f"`{name}`", title, dataset, f"{len(runs)}", f"{epochs:,}"])
    table = "".join(f"| {' | '.join(row)} |\n" for row in rows)
    return re.sub("(?<=<!-- experiments -->\n).*(?=<!-- /experiments -->)", lambda _: table, PAGE.read_text(), flags=re.DOTALL)


def test_the_page_lists_the_declared_experiments():
    assert PAGE.read_text() == updated_page()


if __name__ == "__main__":
    PAGE.write_text(updated_page())
