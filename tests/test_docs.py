"""The method tables in the README and the docs match the code. `python tests/test_docs.py` rewrites them."""

import re
from pathlib import Path

from optg.methods import METHODS, markdown

ROOT = Path(__file__).parent.parent
README, METHODS_PAGE = ROOT / "README.md", ROOT / "docs" / "methods.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", ROOT / "RESULTS.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGE = """# The methods

Made from the code by `python tests/test_docs.py`; `optg methods` prints the same. An option is a field of the method's class:
`optg.methods.{example}(...)`, and each file in `optg/methods/` explains its own.

{table}"""


def readme() -> str:
    """Return the README with the current table of methods."""
    table = markdown("name", "paper", "prunes", "revives to")
    return re.sub("(?<=<!-- methods -->\n).*(?=<!-- /methods -->)", lambda _: table, README.read_text(), flags=re.DOTALL)


def methods_page() -> str:
    """Return docs/methods.md as the code describes the methods."""
    return PAGE.format(example=METHODS["optg"].__name__, table=markdown())


def test_the_table_in_the_readme_matches_the_code() -> None:
    assert README.read_text() == readme(), "run `python tests/test_docs.py`"


def test_the_methods_page_matches_the_code() -> None:
    assert METHODS_PAGE.read_text() == methods_page(), "run `python tests/test_docs.py`"


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        for link in re.findall(r"\]\((?!http)([^)#]+)[^)]*\)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.name}: {link}"


def test_the_files_that_the_docs_name_exist() -> None:
    folders = "optg|tests|docs|benchmarks|examples|results"
    named = [(page, path) for page in PAGES for path in re.findall(rf"`((?:{folders})/[^` ]*)`", page.read_text())]
    missing = [f"{page.name}: {path}" for page, path in named if not any(ROOT.glob(path))]
    assert not missing, "\n".join(missing)


if __name__ == "__main__":
    README.write_text(readme())
    METHODS_PAGE.write_text(methods_page())
