from optg.methods import METHODS, markdown
from tests.cli.calling import call, optg


def test_every_method_is_listed():
    listed = optg("methods").stdout
    assert all(name in listed for name in METHODS)


def test_markdown_prints_the_table_of_the_docs(monkeypatch, capsys):
    call(monkeypatch, "methods", "--markdown")
    assert capsys.readouterr().out == markdown()
