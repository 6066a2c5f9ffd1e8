"""The lists of methods in the README and the docs are made from the code: `python tests/test_docs.py` rewrites them."""

import re
from pathlib import Path

from optg.methods import METHODS, markdown

ROOT = Path(__file__).parent.parent
README, METHODS_PAGE = ROOT / "README.md", ROOT / "docs" / "methods.md"
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "RESULTS.md", "SECURITY.md")] + sorted(
    (ROOT / "docs").glob("*.md")
)
PAGE = """# The methods

`optg methods` prints this table; `python tests/test_docs.py` writes it here. Each option is a field of the method's class, such
as `optg.methods.{example}(alpha=1.0)`, and a flag of the command line: `optg train --method optg --method.alpha 1.0`. Each file
in `optg/methods/` explains its own options.

Every method, `dense` included, also has these options ([design.md](design.md) has the details):

- `ham` (0.0): α of HAM, a multiplicative step after each step of the optimizer; 50 to 200 are usual.
- `sparse_opt` (False): SparseOpt, which scales the updates of each output neuron by the square root of its density, relative to
  the mean of its layer.

The columns:

- *prunes*: when weights are removed.
- *revives to*: the value with which a removed weight can come back; "–" if it never does.

`st3-sigma` is `st3` with scores that depend on the layer's size: |w| · √(sum of the layer's dimensions). `keep` removes nothing
more: it trains a model that is already sparse and keeps its zeros.

{table}"""


def readme() -> str:
    names = ", ".join(f"`{name}`" for name in METHODS)
    return re.sub("(?<=<!-- methods -->\n).*(?=<!-- /methods -->)", f"{names}\n", README.read_text(), flags=re.DOTALL)


def methods_page() -> str:
    return PAGE.format(example=METHODS["optg"].__name__, table=markdown())


def test_readme_lists_every_method():
    assert "<!-- methods -->" in README.read_text()
    assert README.read_text() == readme()


def test_methods_page_matches_the_code():
    assert METHODS_PAGE.read_text() == methods_page()


def test_links_lead_somewhere():
    for page in PAGES:
        links = re.findall(r"\]\((?!http)([^)#]+)[^)]*\)|<img src=\"([^\"]+)\"", page.read_text())
        for link in map("".join, links):
            assert (page.parent / link).exists(), f"{page.name}: {link}"


def test_the_files_that_the_docs_name_exist():
    folders = "optg|tests|docs|benchmarks|examples|results"
    named = [(page, path) for page in PAGES for path in re.findall(rf"`((?:{folders})/[^` ]*)`", page.read_text())]
    missing = [f"{page.name}: {path}" for page, path in named if not any(ROOT.glob(path))]
    assert not missing, "\n".join(missing)


if __name__ == "__main__":
    README.write_text(readme())
    METHODS_PAGE.write_text(methods_page())
