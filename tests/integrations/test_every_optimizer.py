"""Every optimizer of five packages trains a sparse model, or is refused with the reason.

`python -m tests.integrations.test_every_optimizer` writes the list to docs/optimizers.md.
"""

from collections import defaultdict
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.integrations.every_optimizer import BROKEN, PACKAGES, WORKS, find_optimizers, outcome

PAGE = Path(__file__).parents[2] / "docs" / "optimizers.md"
INTRO = """# Optimizers

<!-- `python -m tests.integrations.test_every_optimizer` writes this page. -->

Each optimizer that works has trained a small model with `optg.sparsify`, with GMP and with OptG, and every removed weight was
exactly 0 at every step. `optg.sparsify` or the first step refuses the others with the reason given here; optimizers that need
a GPU, several processes or another package could not be tried.
"""
IN_CI = {
    "torch.optim": sorted(find_optimizers("torch.optim")),
    "timm.optim": ["lamb", "lookahead_sgd", "muon"],
    "pytorch_optimizer": ["AliG", "Lion", "Lookahead", "Muon", "OrthoGrad", "SAM", "SPlus", "SafeFP16Optimizer", "SophiaH"],
    "torch_optimizer": ["Adafactor", "Lookahead", "Yogi"],
    "schedulefree": sorted(find_optimizers("schedulefree")),
}


def page() -> str:
    """Return the page, from a training run with each optimizer and method."""
    text = INTRO
    for package in PACKAGES:
        outcomes = defaultdict(list)
        for name in find_optimizers(package):
            with_gmp, with_optg = outcome(package, name, "gmp"), outcome(package, name, "optg")
            assert with_gmp == with_optg, (package, name)
            outcomes[with_gmp].append(f"`{name}`")
        text += section(package, outcomes)
    return text


def section(package: str, outcomes: dict[str, list[str]]) -> str:
    """Return the part of the page about one package."""
    installed = package.partition(".")[0]
    text = f"\n## {package} ({installed} {version(installed).partition('+')[0]})\n"
    works, broken = outcomes.get(WORKS, []), outcomes.get(BROKEN, [])
    if works:
        text += f"**Works** ({len(works)}): {', '.join(works)}\n"
    refused = {reason: names for reason, names in outcomes.items() if reason not in (WORKS, BROKEN)}
    if refused:
        text += "\n| refused | why |\n| --- | --- |\n"
        text += "".join(f"| {', '.join(names)} | {reason.removeprefix('refused: ')} |\n" for reason, names in refused.items())
    if broken:
        text += f"\n**Not tried** ({len(broken)}), because they do not train here without optg either: {', '.join(broken)}\n"
    return text


@pytest.mark.parametrize("method", ["gmp", "optg"])
@pytest.mark.parametrize(("package", "name"), [(package, name) for package, names in IN_CI.items() for name in names])
def test_the_outcome_is_the_one_in_the_docs(package: str, name: str, method: str) -> None:
    text = PAGE.read_text().partition(f"## {package} ")[2].partition("\n## ")[0]
    line = next(line for line in text.splitlines() if f"`{name}`" in line)
    result = outcome(package, name, method)
    assert line.startswith("**Works**") if result == WORKS else result.removeprefix("refused: ") in line


@pytest.mark.long
def test_the_page_matches_the_code() -> None:
    assert PAGE.read_text() == page()


if __name__ == "__main__":
    PAGE.write_text(page())
