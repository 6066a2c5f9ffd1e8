import json
import math
from dataclasses import asdict
from pathlib import Path

import pytest

from optg.methods import DPF
from optg.report.layers import layer_densities
from optg.report.runs import group_runs, read_runs
from tests.report.fake_runs import LAYERS, make_summary, write_run


def labels(*paths: Path) -> list[str]:
    return [
        record.label.replace("\N{NO-BREAK SPACE}", " ")
        for members in group_runs(read_runs(paths)).values()
        for record in members
    ]


def write_lines(path: Path, *summaries: dict) -> Path:
    path.write_text("".join(json.dumps(known) + "\n" for known in summaries))
    return path


def test_a_folder_is_read_with_its_epochs(tmp_path):
    (run,) = read_runs([write_run(tmp_path / "a", "rigl", 0.91)])
    assert (run.method, run.accuracy, run.sparsity, run.finished, run.epoch) == ("rigl", 0.91, 0.95, True, 12)
    assert run.curve("removed") == [(epoch, 100 * epoch) for epoch in range(1, 13)]
    assert run.curve("score_lr") == []


def test_an_unfinished_run_is_read_up_to_its_last_epoch(tmp_path):
    (run,) = read_runs([write_run(tmp_path / "a", finished=False)])
    assert not run.finished and run.epoch == 6 and run.number("seconds") == 9.0
    assert run.accuracy == run.rows[-1]["accuracy"] and run.sparsity == 0.475


def test_a_run_without_epochs(tmp_path):
    folder = write_run(tmp_path / "a", finished=False)
    (folder / "metrics.jsonl").unlink()
    (run,) = read_runs([folder])
    assert (run.epoch, run.accuracy, run.rows) == (0, None, [])


def test_a_folder_of_runs_stands_for_all_of_them(tmp_path):
    write_run(tmp_path / "a", "rigl")
    write_run(tmp_path / "b", "gmp")
    assert labels(tmp_path, tmp_path / "a") == ["gmp 95 %", "rigl 95 %"]


def test_nested_folders_and_summaries_of_the_same_run_count_once(tmp_path):
    folder = write_run(tmp_path / "reproduce" / "a", "rigl")
    file = write_lines(tmp_path / "all.jsonl", json.loads((folder / "summary.json").read_text()), make_summary("gmp"))
    assert labels(file, tmp_path) == ["gmp 95 %", "rigl 95 %"]
    assert all(run.rows for run in read_runs([file, tmp_path]) if run.method == "rigl")


def test_a_method_that_learns_its_sparsity_is_labelled_by_the_sparsity_reached(tmp_path):
    known = {**make_summary("str"), "sparsity": 0.98}
    assert labels(write_lines(tmp_path / "all.jsonl", known, known | {"sparsity": 0.697413})) == ["str 69.74 %", "str 98 %"]
    assert [run.target for run in read_runs([tmp_path / "all.jsonl"])] == [0.98, 0.6974]


def test_summaries_of_a_file_have_no_epochs(tmp_path):
    file = write_lines(tmp_path / "cifar.jsonl", make_summary("optg"), make_summary("gmp", sparsity=0.9))
    runs = read_runs([file])
    assert [(run.name, run.method, run.rows) for run in runs] == [("cifar:1", "optg", []), ("cifar:2", "gmp", [])]
    (tmp_path / "one.json").write_text(json.dumps(make_summary("set"), indent=2))
    assert labels(tmp_path / "one.json") == ["set 95 %"]


def test_runs_are_grouped_by_model_and_data_and_labelled_by_differences(tmp_path):
    file = write_lines(
        tmp_path / "all.jsonl",
        make_summary(seed=0), make_summary(seed=1), make_summary("dense", sparsity=0.0), make_summary("gmp", lr=0.1),
        make_summary("gmp", lr=0.05, weight_decay=1e-3), make_summary(data="cifar100"), make_summary(data="cifar100"),
    )  # fmt: skip
    assert list(group_runs(read_runs([file]))) == [("vgg19", "cifar10"), ("vgg19", "cifar100")]
    assert labels(file) == [
        "dense",
        "gmp 95 %, lr 0.1",
        "gmp 95 %, weight decay 0.001",
        "optg 95 %, seed 0",
        "optg 95 %, seed 1",
        "optg 95 %, all:6",
        "optg 95 %, all:7",
    ]


def test_labels_name_unusual_settings(tmp_path):
    plain = [make_summary(seed=seed) for seed in (0, 0, 0, 1)]
    plain[1]["options"], plain[2]["settings"]["lr"] = {"alpha": 1.0}, 0.2
    file = write_lines(tmp_path / "all.jsonl", *plain)
    assert labels(file) == ["optg 95 %", "optg 95 %, alpha 1", "optg 95 %, lr 0.2", "optg 95 %, seed 1"]


def test_runs_of_all_methods_decide_which_settings_are_unusual(tmp_path):
    plain = [make_summary(method, sparsity=s) for method, s in (("optg", 0.9), ("gmp", 0.95), ("rigl", 0.95), ("rigl", 0.98))]
    odd = make_summary("set", batch_size=512, optimizer="adamw")
    plain[3]["options"] = {"every": 500}
    file = write_lines(tmp_path / "all.jsonl", *plain, odd, make_summary(sparsity=0.98) | {"options": {"alpha": 1.0}})
    assert labels(file) == [
        "gmp 95 %", "optg 90 %, alpha None", "optg 98 %, alpha 1", "rigl 95 %, every 100", "rigl 98 %, every 500",
        "set 95 %, batch size 512, optimizer adamw",
    ]  # fmt: skip


def test_a_method_seed_equal_to_the_run_seed_is_not_labelled_twice(tmp_path):
    runs = [make_summary("rigl", seed=seed) | {"options": {"seed": seed}} for seed in (0, 1, 2)]
    file = write_lines(tmp_path / "all.jsonl", *runs)
    assert labels(file) == [f"rigl 95 %, seed {seed}" for seed in (0, 1, 2)]


def test_runs_with_equal_names_are_numbered(tmp_path):
    assert labels(write_run(tmp_path / "a" / "x"), write_run(tmp_path / "b" / "x")) == ["optg 95 %, x (1)", "optg 95 %, x (2)"]


def test_finished_and_unfinished_runs_are_labelled_alike(tmp_path):
    write_run(tmp_path / "a", "dpf", seed=0)
    known = {**json.loads((tmp_path / "a" / "summary.json").read_text()), "options": asdict(DPF())}
    (tmp_path / "a" / "summary.json").write_text(json.dumps(known))
    write_run(tmp_path / "b", "dpf", finished=False, seed=1, nesterov=True, compile=True)  # execution settings are not labelled
    assert labels(tmp_path) == ["dpf 95 %, seed 0, no nesterov", "dpf 95 %, seed 1, nesterov"]


def test_an_incomplete_last_line_is_skipped(tmp_path):
    folder = write_run(tmp_path / "a", finished=False)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 70, "epoch": 7, "lo')
    (run,) = read_runs([folder])
    assert run.epoch == 6


def test_an_accuracy_of_nan_is_read(tmp_path):
    (run,) = read_runs([write_run(tmp_path / "a", "gsm", math.nan)])
    assert run.accuracy is not None and math.isnan(run.accuracy) and run.curve("accuracy") == []


def without(key: str) -> str:
    return json.dumps({name: value for name, value in make_summary().items() if name != key})


@pytest.mark.parametrize(
    "file, text, said",
    [
        ("summary.json", '{"method": "op', "summary.json is damaged: Unterminated string"),
        ("summary.json", "\udcff", "summary.json is damaged"),
        ("summary.json", "[]", "summary.json holds a list; expected a table"),
        ("summary.json", without("accuracy"), "summary.json: 'accuracy' is missing; expected a float"),
        ("summary.json", json.dumps({**make_summary(), "settings": {"model": 3}}), "settings: 'model' is 3; expected a str"),
        ("metrics.jsonl", '{"epoch": 1}\nnonsense\n{"epoch": 3}\n', "metrics.jsonl, line 2 is damaged"),
        ("metrics.jsonl", '{"step": 1}\n', "metrics.jsonl, line 1: 'epoch' is missing; expected a int"),
        ("model.safetensors", "no weights", "model.safetensors is damaged: it has no safetensors header"),
    ],
)
def test_damaged_files_are_named(tmp_path, file, text, said):
    folder = write_run(tmp_path / "a", old=True)
    (folder / file).write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ValueError) as error:
        layer_densities(read_runs([folder])[0])
    assert said in str(error.value) and str(folder) in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("data", [b"\xff", b"lr = ", b'method = "no"'])
def test_a_damaged_recipe_of_an_unfinished_run_is_named(tmp_path, data):
    folder = write_run(tmp_path / "a", finished=False)
    (folder / "recipe.toml").write_bytes(data)
    with pytest.raises(ValueError, match=r"recipe\.toml is|unknown method 'no'"):
        read_runs([folder])


def test_paths_without_runs_are_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").write_text("hello")
    for path, said in (
        (tmp_path / "empty", "contains none"),
        (tmp_path / "no", "does not exist"),
        (tmp_path / "notes.txt", "neither"),
    ):
        with pytest.raises(ValueError, match=said):
            read_runs([path])
    with pytest.raises(ValueError, match="nothing to report"):
        read_runs([])


def test_densities_come_from_the_last_cut_or_are_counted_in_the_weights(tmp_path):
    new, old, cut = (
        write_run(tmp_path / "new"),
        write_run(tmp_path / "old", old=True),
        write_run(tmp_path / "cut", finished=False),
    )
    sizes = {name: math.prod(shape) for name, shape in LAYERS.items()}
    kept = {name: 1 - round(0.95 * size) / size for name, size in sizes.items()}
    assert layer_densities(read_runs([new])[0]) == pytest.approx(kept) and list(layer_densities(read_runs([new])[0])) == list(
        LAYERS
    )
    assert layer_densities(read_runs([old])[0]) == pytest.approx(kept)
    assert list(layer_densities(read_runs([old])[0])) == ["classifier.weight", "features.0.weight", "features.10.weight"]
    assert (
        layer_densities(read_runs([cut])[0]) == {}
    )  # neither weights nor a number of classes, which would give the sizes of layers


def test_densities_without_weights_use_the_shapes_of_the_model(tmp_path):
    folder = write_run(tmp_path / "a", model="digits", data="digits")
    (folder / "model.safetensors").unlink()
    from optg.models import build

    layers = {name: [p.numel() // 4, 0, 0] for name, p in build("digits", 10).named_parameters() if p.ndim > 1}
    (folder / "metrics.jsonl").write_text(json.dumps({"epoch": 12, "layers": layers}) + "\n")
    assert layer_densities(read_runs([folder])[0]) == pytest.approx(dict.fromkeys(layers, 0.75))
