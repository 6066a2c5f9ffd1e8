"""The list in docs/experiments.md is made from contents.toml: run as a script, this file writes it anew."""

import re
from pathlib import Path

from optg.experiments.command import everything

PAGE = Path(__file__).parents[2] / "docs" / "experiments.md"


def page() -> str:
    rows = [["name", "what", "on", "runs", "epochs"], ["---"] * 5]
    for name, title, place, runs in everything():
        epochs = sum(run.plan.recipe.epochs for run in runs)
        rows.append([name and f"`{name}`", title, place, f"{len(runs)}", f"{epochs:,}"])
    table = "".join(f"| {' | '.join(row)} |\n" for row in rows)
    return re.sub("(?<=<!-- experiments -->\n).*(?=<!-- /experiments -->)", lambda _: table, PAGE.read_text(), flags=re.DOTALL)


def test_the_list_is_that_of_the_code():
    assert PAGE.read_text() == page()


def test_links_lead_somewhere():
    for link in re.findall(r"\]\((?!http)([^)]+)\)", PAGE.read_text()):
        assert (PAGE.parent / link).exists(), link


if __name__ == "__main__":
    PAGE.write_text(page())
