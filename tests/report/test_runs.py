import json
import math
from dataclasses import asdict
from pathlib import Path

import pytest

from optg.methods import DPF
from optg.report import write
from optg.report.commands import commands_section
from optg.report.figures import make_run_group
from optg.report.layers import layer_densities
from optg.report.page import GroupPlots
from optg.report.runs import group_runs, read_runs
from optg.report.tables import comparison_table, layer_table
from optg.training.errors import DamagedFile
from optg.training.metrics import as_text, chain
from optg.training.recipe import RecipeError
from tests.report.fake_runs import LAYERS, list_files, make_old, make_summary, write_run


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
    assert run.accuracy is None and run.sparsity == 0.475  # the accuracy of an epoch is not the result of the run


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
    list_files(tmp_path / "a")
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


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("file", ["recipe.toml", "summary.json", "metrics.jsonl", "model.safetensors", "manifest.json"])
def test_a_changed_bit_in_any_file_is_noticed(tmp_path, file):
    folder = write_run(tmp_path / "a")
    size = (folder / file).stat().st_size
    for position in range(0, size, 97):
        flip(folder / file, position)
        with pytest.raises(ValueError, match=rf"{folder}/[^ ]*(,.*)? is damaged"):
            layer_densities(read_runs([folder])[0])
        flip(folder / file, position)
    layer_densities(read_runs([folder])[0])


@pytest.mark.parametrize("line", [0, 5, 11])
def test_a_lost_row_is_noticed(tmp_path, line):
    folder = write_run(tmp_path / "a")
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(lines[:line] + lines[line + 1 :]))
    with pytest.raises(ValueError, match=rf"^{folder}/metrics\.jsonl.* is damaged"):
        read_runs([folder])


def test_a_changed_row_is_noticed_in_an_unfinished_run_too(tmp_path):
    folder = write_run(tmp_path / "a", finished=False)
    text = (folder / "metrics.jsonl").read_text()
    (folder / "metrics.jsonl").write_text(text.replace('"epoch": 6', '"epoch": 7'))
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 6 is damaged"):
        read_runs([folder])


def test_a_run_without_its_summary_has_no_result(tmp_path):
    folder = write_run(tmp_path / "a")
    (folder / "summary.json").unlink()
    (run,) = read_runs([folder])
    assert not run.finished and run.accuracy is None and run.epoch == 12


def test_a_manifest_that_was_lost_is_noticed(tmp_path):
    folder = write_run(tmp_path / "a")
    (folder / "manifest.json").unlink()
    with pytest.raises(ValueError, match=r"has lost its manifest\.json"):
        read_runs([folder])


def test_runs_of_older_versions_are_read_with_one_warning(tmp_path):
    for name in "ab":
        make_old(write_run(tmp_path / name))
    with pytest.warns(UserWarning, match=r"2 of 2 runs have no manifest\.json") as caught:
        assert [run.accuracy for run in read_runs([tmp_path])] == [0.93, 0.93]
    assert len(caught) == 1


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
    (folder / "metrics.jsonl").write_bytes(as_text(chain([{"epoch": 12, "layers": layers}])))
    list_files(folder)
    assert layer_densities(read_runs([folder])[0]) == pytest.approx(dict.fromkeys(layers, 0.75))


JUNK = [None, True, "x", [], {}, math.nan, math.inf, 10**400, -(10**400), "\u202e\x1b[2J<b>"]


@pytest.mark.parametrize("junk", JUNK, ids=[repr(junk)[:12] for junk in JUNK])
@pytest.mark.parametrize("method", ["optg", "str"])
def test_wrong_values_are_refused_in_one_line_or_shown_as_unknown(tmp_path, method, junk):
    """Any value of the summary or of the last epoch may be anything."""
    folder = make_old(write_run(tmp_path / "a", method))  # without checksums, which would refuse all of it
    unfinished = make_old(write_run(tmp_path / "b", method, finished=False))
    refused = 0
    for file in (folder / "summary.json", folder / "metrics.jsonl", unfinished / "metrics.jsonl"):
        text = file.read_text()
        *before, last = [text] if file.suffix == ".json" else text.splitlines()
        values = json.loads(last)
        places = [(values, key) for key in values]
        places += [(inner, key) for inner in values.values() if isinstance(inner, dict) for key in inner]
        for holder, key in places:
            good, holder[key] = holder[key], junk
            file.write_text("\n".join([*before, json.dumps(values)]) + "\n")
            holder[key] = good
            try:
                for task, members in group_runs(read_runs([file.parent])).items():
                    group = make_run_group(*task, members)
                    GroupPlots(group)
                    comparison_table(group), layer_table(group), commands_section([group])
            except (RecipeError, DamagedFile):
                refused += 1
        file.write_text(text)
    assert refused


@pytest.mark.parametrize("file", ["summary.json", "metrics.jsonl", "recipe.toml", "model.safetensors"])
def test_brackets_nested_100_000_deep_are_refused(tmp_path, file):
    folder = make_old(write_run(tmp_path / "a"))
    deep = b"[" * 100_000
    if file == "recipe.toml":
        (folder / "summary.json").unlink()
        deep = b"milestones = " + deep
    if file == "model.safetensors":
        deep = len(deep).to_bytes(8, "little") + deep + b" "
    (folder / file).write_bytes(deep + b"\n")
    with pytest.raises((RecipeError, DamagedFile), match=f"{file}.* is (damaged|not valid TOML)"):
        make_run_group("vgg19", "cifar10", read_runs([folder]))


def test_directions_are_not_reversed_on_the_page(tmp_path):
    write(read_from := [write_run(tmp_path / "a\u202eb", "gmp", data="c\u2066d\x1b")], tmp_path / "out", "t\u202e")
    files = [tmp_path / "out" / "index.html", *(tmp_path / "out" / "figures").iterdir()]
    assert read_from and not any({"\u202e", "\u2066", "\x1b"} & set(file.read_text()) for file in files)
