import pytest

from tests.cli.calling import call, refusal


def test_without_a_name_it_lists_the_experiments(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="0"):
        call(monkeypatch, "reproduce")
    assert "cifar" in capsys.readouterr().out


def test_an_unknown_experiment_is_refused(tmp_path, monkeypatch, capsys):
    assert "unknown experiment 'cifra'" in refusal(monkeypatch, capsys, "reproduce", "cifra", "--output", tmp_path)
