from optg.training import recipe
from tests.cli.calling import call, refusal


def test_every_recipe_is_listed(monkeypatch, capsys):
    call(monkeypatch, "recipes")
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == recipe.names()


def test_a_printed_recipe_can_be_loaded(monkeypatch, capsys):
    call(monkeypatch, "recipes", "vgg19-cifar10:authors")
    printed = capsys.readouterr().out
    assert recipe.read(printed, "printed", "vgg19-cifar10:authors") == recipe.load("vgg19-cifar10:authors")


def test_an_unknown_recipe_is_refused(monkeypatch, capsys):
    assert "unknown recipe 'digit'; did you mean 'digits'" in refusal(monkeypatch, capsys, "recipes", "digit")
