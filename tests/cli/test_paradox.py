from tests.cli.calling import refusal


def test_a_model_name_needs_data(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert "--data cifar10" in refusal(monkeypatch, capsys, "paradox", "vgg19")


def test_options_of_the_model(finished_run, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    given = "--model.depth", "3", "--data", "digits"
    assert "digits cannot be built with depth=3" in refusal(monkeypatch, capsys, "paradox", "digits", *given)
    assert "leave out --model.depth" in refusal(monkeypatch, capsys, "paradox", finished_run, *given)
