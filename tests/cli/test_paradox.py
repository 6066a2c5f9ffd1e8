from tests.cli.calling import refusal


def test_a_model_name_needs_data(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert "--data cifar10" in refusal(monkeypatch, capsys, "paradox", "vgg19")
