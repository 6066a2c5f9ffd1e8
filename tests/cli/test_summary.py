import pytest

from tests.cli.calling import call, refusal
from tests.torchvision_import import import_torchvision


def test_a_run_and_its_last_checkpoint_have_the_same_layers(finished_run, monkeypatch, capsys):
    newest = max((finished_run / "checkpoints").glob("step-*"))
    for path in (finished_run, newest):
        call(monkeypatch, "summary", path)
    first, second = (text.splitlines() for text in capsys.readouterr().out.split("all parameters")[:2])
    assert len(first) > 6 and [line for line in first if "weight" in line] == [line for line in second if "weight" in line]


@pytest.mark.parametrize("name", ["digits", "vgg19"])
def test_each_model_has_its_own_default_shape(name, monkeypatch, capsys):
    call(monkeypatch, "summary", name)
    assert "all parameters" in capsys.readouterr().out
    message = refusal(monkeypatch, capsys, "summary", name, "--shape", 2, 8, 8)
    assert f"{name} does not take images of 2×8×8; give another --shape" in message


def test_options_of_the_model(finished_run, monkeypatch, capsys):
    import_torchvision()  # timm needs it
    message = refusal(monkeypatch, capsys, "summary", "timm:vit_tiny_patch16_224")
    assert "does not take images of 3×32×32; give --model.img-size 32, or give another --shape" in message
    call(monkeypatch, "summary", "timm:vit_tiny_patch16_224", "--model.img-size", "32", "--model.depth=1")
    printed = capsys.readouterr().out
    assert "blocks.0.attn.qkv.weight" in printed and "blocks.1" not in printed
    message = refusal(monkeypatch, capsys, "summary", finished_run, "--model.img-size", "32")
    assert "is opened as it was trained; leave out --model.img-size" in message


@pytest.mark.parametrize("command", ["summary", "bench", "paradox"])
def test_the_help_names_the_options_of_the_model(command, monkeypatch, capsys):
    with pytest.raises(SystemExit):
        call(monkeypatch, command, "--help")
    assert "--model.KEY VALUE" in capsys.readouterr().out


def test_a_missing_folder_is_refused(monkeypatch, capsys):
    assert "there is no folder /nonexistent" in refusal(monkeypatch, capsys, "summary", "/nonexistent")
