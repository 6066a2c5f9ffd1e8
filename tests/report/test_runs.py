import json
import math
from dataclasses import asdict
from pathlib import Path

import made
import pytest

from optg.methods import DPF
from optg.report.layers import densities
from optg.report.runs import group, read_all


def labels(*paths: Path) -> list[str]:
    return [run.label.replace("\N{NO-BREAK SPACE}", " ") for members in group(read_all(paths)).values() for run in members]


def write_lines(path: Path, *summaries: dict) -> Path:
    path.write_text("".join(json.dumps(known) + "\n" for known in summaries))
    return path


def test_a_folder_is_read_with_its_epochs(tmp_path):
    (run,) = read_all([made.run(tmp_path / "a", "rigl", 0.91)])
    assert (run.method, run.accuracy, run.sparsity, run.finished, run.epoch) == ("rigl", 0.91, 0.95, True, 12)
    assert run.curve("removed") == [(epoch, 100 * epoch) for epoch in range(1, 13)]
    assert run.curve("score_lr") == []


def test_a_run_that_has_not_ended_is_shown_as_far_as_it_got(tmp_path):
    (run,) = read_all([made.run(tmp_path / "a", ended=False)])
    assert not run.finished and run.epoch == 6 and run.number("seconds") == 9.0
    assert run.accuracy == run.rows[-1]["accuracy"] and run.sparsity == 0.475


def test_a_run_with_no_epoch_yet(tmp_path):
    folder = made.run(tmp_path / "a", ended=False)
    (folder / "metrics.jsonl").unlink()
    (run,) = read_all([folder])
    assert (run.epoch, run.accuracy, run.rows) == (0, None, [])


def test_a_folder_of_runs_stands_for_all_of_them_each_once(tmp_path):
    made.run(tmp_path / "a", "rigl")
    made.run(tmp_path / "b", "gmp")
    assert labels(tmp_path, tmp_path / "a") == ["gmp 95 %", "rigl 95 %"]


def test_folders_in_folders_and_lines_that_repeat_a_folder(tmp_path):
    folder = made.run(tmp_path / "reproduce" / "a", "rigl")
    file = write_lines(tmp_path / "all.jsonl", json.loads((folder / "summary.json").read_text()), made.summary("gmp"))
    assert labels(file, tmp_path) == ["gmp 95 %", "rigl 95 %"]
    assert all(run.rows for run in read_all([file, tmp_path]) if run.method == "rigl")


def test_a_method_that_finds_its_sparsity_is_named_by_what_it_found(tmp_path):
    known = {**made.summary("str"), "sparsity": 0.98}
    assert labels(write_lines(tmp_path / "all.jsonl", known, known | {"sparsity": 0.697413})) == ["str 69.74 %", "str 98 %"]
    assert [run.target for run in read_all([tmp_path / "all.jsonl"])] == [0.98, 0.6974]


def test_summaries_of_a_file_have_no_epochs(tmp_path):
    file = write_lines(tmp_path / "cifar.jsonl", made.summary("optg"), made.summary("gmp", sparsity=0.9))
    runs = read_all([file])
    assert [(run.name, run.method, run.rows) for run in runs] == [("cifar:1", "optg", []), ("cifar:2", "gmp", [])]
    (tmp_path / "one.json").write_text(json.dumps(made.summary("set"), indent=2))
    assert labels(tmp_path / "one.json") == ["set 95 %"]


def test_runs_are_grouped_by_model_and_data_and_named_by_what_differs(tmp_path):
    file = write_lines(
        tmp_path / "all.jsonl",
        made.summary(seed=0), made.summary(seed=1), made.summary("dense", sparsity=0.0), made.summary("gmp", lr=0.1),
        made.summary("gmp", lr=0.05, weight_decay=1e-3), made.summary(data="cifar100"), made.summary(data="cifar100"),
    )  # fmt: skip
    assert list(group(read_all([file]))) == [("vgg19", "cifar10"), ("vgg19", "cifar100")]
    assert labels(file) == [
        "dense",
        "gmp 95 %, lr 0.1",
        "gmp 95 %, weight decay 0.001",
        "optg 95 %, seed 0",
        "optg 95 %, seed 1",
        "optg 95 %, all:6",
        "optg 95 %, all:7",
    ]


def test_runs_are_named_by_what_is_not_usual(tmp_path):
    plain = [made.summary(seed=seed) for seed in (0, 0, 0, 1)]
    plain[1]["options"], plain[2]["settings"]["lr"] = {"alpha": 1.0}, 0.2
    file = write_lines(tmp_path / "all.jsonl", *plain)
    assert labels(file) == ["optg 95 %", "optg 95 %, alpha 1", "optg 95 %, lr 0.2", "optg 95 %, seed 1"]


def test_runs_of_other_methods_show_what_is_usual_too(tmp_path):
    plain = [made.summary(method, sparsity=s) for method, s in (("optg", 0.9), ("gmp", 0.95), ("rigl", 0.95), ("rigl", 0.98))]
    odd = made.summary("set", batch_size=512, optimizer="adamw")
    plain[3]["options"] = {"every": 500}
    file = write_lines(tmp_path / "all.jsonl", *plain, odd, made.summary(sparsity=0.98) | {"options": {"alpha": 1.0}})
    assert labels(file) == [
        "gmp 95 %", "optg 90 %, alpha None", "optg 98 %, alpha 1", "rigl 95 %, every 100", "rigl 98 %, every 500",
        "set 95 %, batch size 512, optimizer adamw",
    ]  # fmt: skip


def test_the_seed_of_a_method_is_that_of_its_run(tmp_path):
    runs = [made.summary("rigl", seed=seed) | {"options": {"seed": seed}} for seed in (0, 1, 2)]
    file = write_lines(tmp_path / "all.jsonl", *runs)
    assert labels(file) == [f"rigl 95 %, seed {seed}" for seed in (0, 1, 2)]


def test_even_the_same_name_twice_is_told_apart(tmp_path):
    assert labels(made.run(tmp_path / "a" / "x"), made.run(tmp_path / "b" / "x")) == ["optg 95 %, x (1)", "optg 95 %, x (2)"]


def test_a_run_that_has_not_ended_is_named_like_one_that_has(tmp_path):
    made.run(tmp_path / "a", "dpf", seed=0)
    known = {**json.loads((tmp_path / "a" / "summary.json").read_text()), "options": asdict(DPF())}
    (tmp_path / "a" / "summary.json").write_text(json.dumps(known))
    made.run(tmp_path / "b", "dpf", ended=False, seed=1, nesterov=True, compile=True)  # how it is computed says nothing
    assert labels(tmp_path) == ["dpf 95 %, seed 0, no nesterov", "dpf 95 %, seed 1, nesterov"]


def test_a_line_that_was_cut_off_is_passed_over(tmp_path):
    folder = made.run(tmp_path / "a", ended=False)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 70, "epoch": 7, "lo')
    (run,) = read_all([folder])
    assert run.epoch == 6


def test_an_accuracy_that_is_not_a_number_is_read(tmp_path):
    (run,) = read_all([made.run(tmp_path / "a", "gsm", math.nan)])
    assert run.accuracy is not None and math.isnan(run.accuracy) and run.curve("accuracy") == []


def without(key: str) -> str:
    return json.dumps({name: value for name, value in made.summary().items() if name != key})


@pytest.mark.parametrize(
    "file, text, said",
    [
        ("summary.json", '{"method": "op', "summary.json is damaged: Unterminated string"),
        ("summary.json", "\udcff", "summary.json is damaged"),
        ("summary.json", "[]", "summary.json holds a list; expected a table"),
        ("summary.json", without("accuracy"), "summary.json: 'accuracy' is missing; expected a float"),
        ("summary.json", json.dumps({**made.summary(), "settings": {"model": 3}}), "settings: 'model' is 3; expected a str"),
        ("metrics.jsonl", '{"epoch": 1}\nnonsense\n{"epoch": 3}\n', "metrics.jsonl, line 2 is damaged"),
        ("metrics.jsonl", '{"step": 1}\n', "metrics.jsonl, line 1: 'epoch' is missing; expected a int"),
        ("model.safetensors", "no weights", "model.safetensors is damaged: it does not begin as a safetensors file does"),
    ],
)
def test_what_is_damaged_is_named(tmp_path, file, text, said):
    folder = made.run(tmp_path / "a", old=True)
    (folder / file).write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ValueError) as error:
        densities(read_all([folder])[0])
    assert said in str(error.value) and str(folder) in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("data", [b"\xff", b"lr = ", b'method = "no"'])
def test_a_damaged_recipe_of_a_run_that_has_not_ended_is_named(tmp_path, data):
    folder = made.run(tmp_path / "a", ended=False)
    (folder / "recipe.toml").write_bytes(data)
    with pytest.raises(ValueError, match=r"recipe\.toml is|unknown method 'no'"):
        read_all([folder])


def test_what_is_no_run_is_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").write_text("hello")
    for path, said in (
        (tmp_path / "empty", "has none in it"),
        (tmp_path / "no", "there is no"),
        (tmp_path / "notes.txt", "neither"),
    ):
        with pytest.raises(ValueError, match=said):
            read_all([path])
    with pytest.raises(ValueError, match="nothing to report"):
        read_all([])


def test_densities_are_those_of_the_last_cut_or_counted_from_the_weights(tmp_path):
    new, old, cut = (made.run(tmp_path / "new"), made.run(tmp_path / "old", old=True), made.run(tmp_path / "cut", ended=False))
    sizes = {name: math.prod(shape) for name, shape in made.LAYERS.items()}
    kept = {name: 1 - round(0.95 * size) / size for name, size in sizes.items()}
    assert densities(read_all([new])[0]) == pytest.approx(kept) and list(densities(read_all([new])[0])) == list(made.LAYERS)
    assert densities(read_all([old])[0]) == pytest.approx(kept)
    assert list(densities(read_all([old])[0])) == ["classifier.weight", "features.0.weight", "features.10.weight"]
    assert densities(read_all([cut])[0]) == {}  # no weights to know the layers' sizes from, and no number of classes


def test_densities_without_weights_come_from_the_models_own_shapes(tmp_path):
    folder = made.run(tmp_path / "a", model="digits", data="digits")
    (folder / "model.safetensors").unlink()
    from optg.models import build

    layers = {name: [p.numel() // 4, 0, 0] for name, p in build("digits", 10).named_parameters() if p.ndim > 1}
    (folder / "metrics.jsonl").write_text(json.dumps({"epoch": 12, "layers": layers}) + "\n")
    assert densities(read_all([folder])[0]) == pytest.approx(dict.fromkeys(layers, 0.75))
