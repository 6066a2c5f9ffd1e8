import json

from tests.cli.calling import call, refusal


def test_an_unknown_model_is_refused(monkeypatch, capsys):
    assert "unknown model 'vgg20'; did you mean 'vgg19'?" in refusal(monkeypatch, capsys, "bench", "vgg20")


def test_options_of_the_model(finished_run, tmp_path, monkeypatch, capsys):
    settings = "--engines", "torch", "--batches", "1", "--threads", "1", "--seconds", "0.01", "--classes", "3"
    call(monkeypatch, "bench", "digits", *settings)
    refused = refusal(monkeypatch, capsys, "bench", "digits", *settings, "--model.depth", "3")
    assert "digits cannot be built with depth=3" in refused
    assert "leave out --model.depth" in refusal(monkeypatch, capsys, "bench", finished_run, "--model.depth", "3")
    options = "--model.width=5", "--shape", "1", "8", "8", "--output", tmp_path / "bench.json"
    call(monkeypatch, "bench", "tests.training.user_code:model", *options, *settings)
    dense = 6 * 9 * 64 + 96 * 5 + 5 * 3
    subject = json.loads((tmp_path / "bench.json").read_text())["subject"]
    assert subject["dense_flops"] == dense and subject["name"].startswith("tests.training.user_code:model(width=5) with random")
