"""Tables in the README and the docs are made from the code: `python tests/test_docs.py` writes them anew."""

import re
from pathlib import Path

from optg.methods import METHODS, markdown

ROOT = Path(__file__).parent.parent
README, METHODS_PAGE = ROOT / "README.md", ROOT / "docs" / "methods.md"
PAGE = """# The methods

Made from the code by `python tests/test_docs.py`; `optg methods` prints the same. An option is a field of the method's class:
`optg.methods.{example}(...)`, and each file in `optg/methods/` explains its own.

{table}"""


def readme() -> str:
    table = markdown("name", "paper", "prunes", "revives to")
    return re.sub("(?<=<!-- methods -->\n).*(?=<!-- /methods -->)", lambda _: table, README.read_text(), flags=re.DOTALL)


def methods_page() -> str:
    return PAGE.format(example=METHODS["optg"].__name__, table=markdown())


def test_the_readmes_table_is_that_of_the_code():
    assert README.read_text() == readme()


def test_the_methods_page_is_that_of_the_code():
    assert METHODS_PAGE.read_text() == methods_page()


def test_links_lead_somewhere():
    for page in (README, ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")):
        for link in re.findall(r"\]\((?!http)([^)]+)\)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.name}: {link}"


if __name__ == "__main__":
    README.write_text(readme())
    METHODS_PAGE.write_text(methods_page())
