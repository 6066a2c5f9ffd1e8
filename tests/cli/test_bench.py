from tests.cli.calling import refusal


def test_an_unknown_model_is_refused(monkeypatch, capsys):
    assert "unknown model 'vgg20'; did you mean 'vgg19'?" in refusal(monkeypatch, capsys, "bench", "vgg20")
