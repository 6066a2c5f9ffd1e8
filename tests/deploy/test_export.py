"""Export: from a run or a checkpoint to a file and back, on the command line."""

import json
import os
import shutil
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import optg
from tests.deploy.conftest import Cli
from tests.report.fake_runs import list_files


def test_save_stores_negative_zeros_as_zeros(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 200), torch.nn.ReLU(), torch.nn.Linear(200, 7)).train()
    with torch.no_grad():
        for layer in (model[1], model[3]):
            layer.weight *= torch.rand_like(layer.weight) < 0.05
    size = optg.save(model, tmp_path / "model.optg", torch.randn(2, 3, 8, 8), name="mine")
    assert model.training and size == (tmp_path / "model.optg").stat().st_size < 0.15 * 4 * 40_000
    loaded = optg.load(tmp_path / "model.optg")
    assert (loaded.about.name, loaded.about.classes, loaded.about.shape) == ("mine", 7, (3, 8, 8))
    assert all(torch.equal(t, model.state_dict()[key]) for key, t in loaded.state_dict().items())
    images = torch.randn(5, 3, 8, 8)
    torch.testing.assert_close(loaded(images), model(images))


def test_run_is_exported_to_a_small_file_and_loaded_again(trained_run: Path, cli: Cli, tmp_path: Path) -> None:
    code, out, _ = cli("export", trained_run)
    assert code == 0 and f"{trained_run}/model.optg" in out and "of the 0.394 MB of the dense float32 tensors" in out
    assert "of 98,026 parameters are non-zero" in out and "of 1.50 MFLOPs" in out
    again = cli("export", trained_run, "--values", "bfloat16")[1]
    assert "It replaces the earlier model.optg." in again and "replaces" not in out
    assert cli("export", trained_run)[0] == 0
    path = trained_run / "model.optg"
    loaded, state = optg.load(path), load_file(trained_run / "model.safetensors")
    assert path.stat().st_size < 0.28 * (trained_run / "model.safetensors").stat().st_size
    assert all(torch.equal(value, state[name]) for name, value in loaded.state_dict().items()) and len(state) == len(
        loaded.state_dict()
    )
    about, summary = loaded.about, json.loads((trained_run / "summary.json").read_text())
    assert about.account == {key: summary[key] for key in ("parameters", "nonzero", "flops", "dense_flops")}
    assert about.origin["accuracy"] == summary["accuracy"] and about.origin["method"] == "optg"
    assert (about.name, about.classes, about.shape) == (trained_run.name, 10, (1, 8, 8)) and about.labels == tuple("0123456789")

    code, out, _ = cli("export", trained_run, "--values", "bfloat16", "--output", tmp_path / "half.optg")
    assert code == 0 and "(weights as bfloat16)" in out and (tmp_path / "half.optg").stat().st_size < 0.7 * path.stat().st_size
    half = optg.load(tmp_path / "half.optg").state_dict()
    assert torch.equal(half["4.weight"], state["4.weight"].bfloat16().float()) and torch.equal(
        half["5.weight"], state["5.weight"]
    )


def test_checkpoint_is_exported_even_if_its_run_has_not_finished(trained_run: Path, cli: Cli, tmp_path: Path) -> None:
    checkpoint = sorted((trained_run / "checkpoints").iterdir())[-1]
    assert cli("export", checkpoint, "--output", tmp_path / "a.optg")[0] == 0
    unfinished = tmp_path / "unfinished"
    os.makedirs(unfinished / "checkpoints")
    (unfinished / "recipe.toml").write_text((trained_run / "recipe.toml").read_text())
    (unfinished / "checkpoints" / checkpoint.name).symlink_to(checkpoint)
    code, out, _ = cli("export", unfinished / "checkpoints" / checkpoint.name)
    assert code == 0 and f"{unfinished}/{checkpoint.name}.optg" in out
    a, b = (optg.load(path).state_dict() for path in (tmp_path / "a.optg", unfinished / f"{checkpoint.name}.optg"))
    state = load_file(trained_run / "model.safetensors")
    assert all(torch.equal(a[name], value) and torch.equal(b[name], value) for name, value in state.items())


def test_export_to_safetensors(trained_run: Path, cli: Cli, tmp_path: Path) -> None:
    code, _, _ = cli("export", trained_run, "--to", "safetensors", "--output", tmp_path / "plain.safetensors")
    found, state = load_file(tmp_path / "plain.safetensors"), load_file(trained_run / "model.safetensors")
    assert code == 0 and found.keys() == state.keys() and all(torch.equal(found[name], state[name]) for name in state)
    with safe_open(tmp_path / "plain.safetensors", "pt") as file:
        assert json.loads(file.metadata()["optg"])["shape"] == [1, 8, 8]
    cli("export", trained_run)
    assert cli("export", trained_run / "model.optg", "--to", "safetensors")[0] == 0  # from a packed file
    found = load_file(trained_run / "model.dense.safetensors")
    assert found.keys() == state.keys() and all(torch.equal(found[name], state[name]) for name in state)


def test_wrong_arguments_give_a_one_line_error(trained_run: Path, cli: Cli, tmp_path: Path) -> None:
    cli("export", trained_run)
    (tmp_path / "text").write_text("no model")
    for args, message in (
        (("export", "nothing"), "there is no nothing"),
        (("export", tmp_path), "is neither the folder of a run"),
        (("export", tmp_path / "text"), "text: not a packed model"),
        (("export", trained_run / "model.optg"), "is already a packed file"),
        (("export", trained_run, "--output", tmp_path), "is a folder; expected a file"),
        (
            ("export", trained_run, "--to", "safetensors", "--output", trained_run / "model.safetensors"),
            "is the run's own model",
        ),
        (("export", trained_run, "--output", tmp_path / "no" / "file"), "there is no folder"),
        (("export", trained_run, "--to", "onnx", "--values", "bfloat16"), "only works with --to packed"),
    ):
        code, out, err = cli(*args)
        assert code == 2 and message in err and err.count("\n") == 1 and not out, (args, err)


def test_zero_channels_are_removed_on_request(trained_run: Path, cli: Cli, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained_run, run)
    state = load_file(run / "model.safetensors")
    state["0.weight"][:5] = state["1.weight"][:5] = state["1.bias"][:5] = 0
    save_file(state, run / "model.safetensors")
    list_files(run)

    assert cli("export", run, "--output", tmp_path / "whole.optg")[0] == 0
    code, out, _ = cli("export", run, "--shrink", "--output", tmp_path / "small.optg")
    assert "of the 0.394 MB of the dense float32 tensors before shrinking" in out
    whole, small = optg.load(tmp_path / "whole.optg"), optg.load(tmp_path / "small.optg")
    channels = len(state["0.weight"])
    assert code == 0 and len(small.state_dict()["0.weight"]) == channels - 5
    assert small.about.account["parameters"] < whole.about.account["parameters"] and small.about.labels == whole.about.labels
    assert f"of {small.about.account['parameters']:,} parameters" in out
    images = torch.randn(3, 1, 8, 8)
    torch.testing.assert_close(small(images), whole(images), atol=1e-5, rtol=1e-5)

    code, _, error = cli("export", run, "--shrink", "--to", "safetensors")
    assert code and "--shrink changes the shapes of tensors" in error
    code, _, error = cli("export", tmp_path / "whole.optg", "--shrink", "--to", "onnx")
    assert code and "--shrink needs the run or a checkpoint" in error
