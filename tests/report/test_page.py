import hashlib
import json
import math
import os
import re
import subprocess
import sys
from dataclasses import asdict
from html.parser import HTMLParser
from pathlib import Path

import pytest

from optg.report import write
from optg.report.figures import MAX_NAMED, make_run_group
from optg.report.runs import group_runs, read_runs
from tests.report.fake_runs import make_old, make_summary, write_forty_runs, write_run

PARTS = ("Accuracy against sparsity and FLOPs", "Training", "Schedules", "Removed and revived weights", "Layers")


def render(output: Path, *paths: Path) -> str:
    return write(paths, output, "Runs").read_text().replace("\N{NO-BREAK SPACE}", " ")


class Tags(HTMLParser):
    """Collect every element of the page, and check that elements are closed in order."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_a_page_of_two_methods(tmp_path):
    write_run(tmp_path / "runs" / "one", "optg", 0.9268, epochs=160)
    write_run(tmp_path / "runs" / "two", "rigl", 0.9)
    page = render(tmp_path / "out", tmp_path / "runs")
    assert [title for title in PARTS if f"<h3>{title}</h3>" in page] == list(PARTS)
    assert 'class="missing"' not in page
    cells = re.search(r"optg 95 %, epochs 160</span></th>(.*?)</tr>", page).group(1)
    assert re.findall(r"<td class=n>([^<]*)</td>", cells) == [
        "92.68", "93.79", "−1.11", "95.00", "1.00 M", "19.9 M", "5.0", "160", "0", "2 min 32 s",
    ]  # fmt: skip
    cells = re.search(r"rigl 95 %, epochs 12</span></th>(.*?)</tr>", page).group(1)
    assert re.findall(r"<td class=n>([^<]*)</td>", cells)[:3] == ["90.00", "93.35", "–"]  # 12 epochs, not 160
    assert "optg train --method optg --output one" in page and "torch 2.11.0" in page and "revision 0e60166a1250" in page
    assert "Tab. 1 of the OptG paper, 160 epochs" in page and "The paper&#x27;s text gives SNIP 89.59" in page


def test_figures_are_written_as_files_and_old_ones_are_removed(tmp_path):
    write_run(tmp_path / "one")
    (tmp_path / "out" / "figures").mkdir(parents=True)
    (tmp_path / "out" / "figures" / "mine.svg").write_text("<svg/>")
    render(tmp_path / "out", tmp_path / "one")
    names = {path.name.removeprefix("vgg19-on-cifar10-") for path in (tmp_path / "out" / "figures").iterdir()}
    assert names == {
        "accuracy.svg", "accuracy-late.svg", "loss.svg", "test-loss.svg", "sparsity.svg", "rate.svg", "mask-rate.svg",
        "removed.svg", "revived.svg", "layers.svg", "accuracy-sparsity.svg", "accuracy-flops.svg", "mine.svg",
    }  # fmt: skip
    render(tmp_path / "out", write_run(tmp_path / "two", data="cifar100"))
    left = {path.name for path in (tmp_path / "out" / "figures").iterdir()}
    assert "mine.svg" in left and not any("cifar10-" in name for name in left) and len(left) == 13


def test_links_and_fifos_in_the_output_are_not_followed(tmp_path):
    write_run(tmp_path / "runs" / "a")
    precious = tmp_path / "precious"
    precious.write_text("precious")
    (tmp_path / "out" / "figures").mkdir(parents=True)
    (tmp_path / "out" / "index.html").symlink_to(precious)
    os.mkfifo(tmp_path / "out" / "figures" / "old.svg")
    page = write([tmp_path / "runs"], tmp_path / "out", "Report")
    assert precious.read_text() == "precious" and page.read_text().startswith("<!") and not page.is_symlink()


def test_flags_are_given_for_defaults_that_have_changed(tmp_path):
    from optg.training.recipe import build_method, load

    plan = load("vgg19-cifar10")
    plan.method = "granet"
    typed = "optg train --recipe vgg19-cifar10 --method granet --weight_decay=5e-4 --method.fraction 0.3"
    known = make_summary("granet", command=typed) | {"recipe": "vgg19-cifar10", "options": asdict(build_method(plan))}
    known["settings"] = asdict(plan.recipe) | {"weight_decay": 5e-4, "folder": "elsewhere"}
    known["options"] |= {"fraction": 0.3}
    (tmp_path / "a.json").write_text(json.dumps(known))
    assert "Defaults have changed" not in render(tmp_path / "out", tmp_path / "a.json")
    known["options"]["until"], known["settings"]["nesterov"] = 0.5, True
    (tmp_path / "a.json").write_text(json.dumps(known))
    assert "To repeat it today, add --nesterov --method.until 0.5." in render(tmp_path / "out", tmp_path / "a.json")


def test_what_quantize_has_changed_is_no_changed_default(tmp_path):
    from optg.training.recipe import build_method, load

    plan = load("digits")
    typed = "optg train --recipe digits --method optg --quantize int8"
    known = make_summary("optg", command=typed) | {"recipe": "digits"}
    known["settings"] = asdict(plan.recipe) | {"quantize": "int8"}
    for end in (0.9, 0.8):
        known["options"] = asdict(build_method(plan)) | {"end": end}
        (tmp_path / "a.json").write_text(json.dumps(known))
        assert ("Defaults have changed" in render(tmp_path / "out", tmp_path / "a.json")) == (end == 0.8)


def test_a_sparsity_that_follows_from_the_structure_is_no_changed_default(tmp_path):
    from optg.training.recipe import load

    plan = load("vgg19-cifar10")
    typed = "optg train --recipe vgg19-cifar10 --method gmp --structure 2:4"
    known = make_summary("gmp", command=typed) | {"recipe": "vgg19-cifar10", "options": {}}
    for structure in ("2:4", "4:2"):
        known["settings"] = asdict(plan.recipe) | {"structure": structure, "sparsity": 0.5}
        (tmp_path / "a.json").write_text(json.dumps(known))
        assert ("Defaults have changed" in render(tmp_path / "out", tmp_path / "a.json")) == (structure == "4:2")


def test_missing_values_are_explained(tmp_path):
    page = render(tmp_path / "out", write_run(tmp_path / "old", finished=False, old=True))
    for said in (
        "1 run is unfinished and shown up to the last recorded epoch",
        "6 of 12",
        'optg 95 % <span class="flag">unfinished</span>',
        "No finished run has an accuracy",
        "No learning rate of mask scores was recorded",
        "Removed and revived weights were not recorded",
        "The density of layers was not recorded",
        "The command is recorded when a run finishes",
    ):
        assert said in page, said
    (tmp_path / "all.jsonl").write_text(json.dumps(make_summary()) + "\n")
    assert "Only the summaries of these runs are known" in render(tmp_path / "out", tmp_path / "all.jsonl")


def test_runs_missing_from_a_figure_are_named_beside_it(tmp_path):
    for i, accuracy in enumerate((0.93, 0.92, 0.925, 0.1)):
        write_run(tmp_path / "runs" / str(i), "gmp", accuracy, seed=i)
    write_run(tmp_path / "runs" / "set", "set", old=True)
    write_run(tmp_path / "runs" / "dpf", "dpf", finished=False)
    page = render(tmp_path / "out", tmp_path / "runs")
    results, training, cuts, layers = (
        page[page.index(f"<h3>{start}") :].split("<h3>")[1] for start in (PARTS[0], PARTS[1], PARTS[3], PARTS[4])
    )
    assert (
        "far below the others: gmp 95 %, seed 3 (10.00 %)." in results
        and "because unfinished or not recorded: dpf 95 %." in results
    )
    assert 'class="missing"' not in training
    assert "because unfinished or not recorded: set 95 %." in cuts and "because unfinished or not recorded: dpf 95 %." in layers


def test_an_accuracy_of_nan_is_a_dash(tmp_path):
    page = render(tmp_path / "out", write_run(tmp_path / "a", "gsm", math.nan))
    assert "nan" not in re.sub(r"<style>.*?</style>", "", page, flags=re.DOTALL).lower().replace("nance", "")
    assert "<td class=n>–</td><td class=n>–</td><td class=n>–</td><td class=n>95.00</td>" in page


def test_mean_and_deviation_over_seeds(tmp_path):
    for seed, accuracy in enumerate((0.92, 0.93, 0.94)):
        write_run(tmp_path / "runs" / str(seed), "optg", accuracy, seed=seed)
        with (tmp_path / "runs" / "rigl.jsonl").open("a") as file:  # RigL also has the seed among its options
            file.write(json.dumps(make_summary("rigl", accuracy, seed=seed) | {"options": {"seed": seed}}) + "\n")
    page = render(tmp_path / "out", tmp_path / "runs", tmp_path / "runs" / "rigl.jsonl")
    for method in ("optg", "rigl"):
        row = re.search(rf"{method} 95 %</span></th>(.*?)</tr>", page).group(1)
        assert re.findall(r"<td class=n>([^<]*)</td>", row) == ["93.00", "± 1.00", "3", "92.00 to 94.00"]


def test_a_repeated_run_does_not_count_as_another_seed(tmp_path):
    for i, (seed, accuracy) in enumerate(((0, 0.92), (0, 0.94))):
        write_run(tmp_path / "runs" / str(i), "optg", accuracy, seed=seed)
    assert "Mean over seeds" not in render(tmp_path / "one", tmp_path / "runs")
    write_run(tmp_path / "runs" / "2", "optg", 0.93, seed=1)
    page = render(tmp_path / "two", tmp_path / "runs")
    row = re.search(r"optg 95 %</span></th>(<td class=n>[^<]*</td><td class=n>±.*?)</tr>", page).group(1)
    assert re.findall(r"<td class=n>([^<]*)</td>", row) == ["92.50", "± 0.71", "2", "92.00 to 93.00"]


def test_every_run_in_a_legend_has_its_own_look(tmp_path):
    runs = [write_run(tmp_path / str(i), sparsity=0.5 + 0.04 * i) for i in range(MAX_NAMED)]
    [group] = [make_run_group(*task, members) for task, members in group_runs(read_runs(runs)).items()]
    assert len(set(group.looks)) == MAX_NAMED


def test_means_over_seeds_need_equal_recipes(tmp_path):
    for seed, schedule in enumerate(("cosine", "hold")):
        known = make_summary(seed=seed, schedule=schedule)
        known["options"] = {"schedule": "sigmoid"}  # an option of the method with the name of a recipe setting
        with (tmp_path / "all.jsonl").open("a") as file:
            file.write(json.dumps(known) + "\n")
    page = render(tmp_path / "out", tmp_path / "all.jsonl")
    assert "Mean over seeds" not in page and "optg 95 %, seed 1, schedule hold" in page


def test_impossible_numbers_do_no_harm(tmp_path):
    """Files may have values that no run should have."""
    for i, odd in enumerate((0, -1, 5e-324, -1e99, 1e99, 1e308, 10**400, math.inf, math.nan)):
        known = make_summary("gmp", odd) | {
            "flops": odd,
            "dense_flops": odd,
            "nonzero": odd,
            "seconds": odd,
            "sparsity": odd,
        }
        known["settings"]["epochs"] = i - 1
        folder = make_old(write_run(tmp_path / "runs" / str(i), "gmp"))
        (folder / "summary.json").write_text(json.dumps(known))
        names = ("loss", "test_loss", "accuracy", "sparsity", "lr", "score_lr", "removed", "revived", "seconds")
        row = dict.fromkeys(names, odd) | {"layers": {"classifier.weight": [odd], "features.0.weight": "x"}}
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row | {"epoch": epoch}) + "\n" for epoch in (1, 2)))
    Tags(render(tmp_path / "out", tmp_path / "runs"))


def test_hostile_names_stay_text(tmp_path):
    evil = '"><script>alert(1)</script><img src=x onerror=alert(1)>'.replace("/", "∕")
    write_run(tmp_path / evil, "optg", data=f"my:{evil}", model=evil)
    write_run(tmp_path / "b", f"optg'{evil}", data=f"my:{evil}", model=evil)
    tags = Tags(write([tmp_path], tmp_path / "out", evil).read_text())
    assert {"script", "img"}.isdisjoint(tag for tag, _ in tags.found)
    assert not any(name.startswith("on") for _, attributes in tags.found for name in attributes)
    for figure in (tmp_path / "out" / "figures").iterdir():
        assert "<script" not in figure.read_text() and figure.parent == tmp_path / "out" / "figures"


def test_a_page_of_forty_runs_loads_nothing(tmp_path):
    page = write([write_forty_runs(tmp_path / "runs")], tmp_path / "out", "Runs").read_text()
    tags = Tags(page)
    assert {"script", "link", "iframe", "img"}.isdisjoint(tag for tag, _ in tags.found)
    addresses = [a[name] for _, a in tags.found for name in ("href", "src", "xlink:href") if name in a]
    assert addresses and all(address.startswith("#") for address in addresses)
    assert "url(" not in page and "@import" not in page and len(page) < 400_000
    anchors = {a["id"] for _, a in tags.found if "id" in a}
    assert {address[1:] for address in addresses} == anchors


def test_the_same_runs_give_the_same_bytes(tmp_path):
    write_forty_runs(tmp_path / "runs")
    digests = []
    for name in ("a", "b"):
        write([tmp_path / "runs"], tmp_path / name, "Runs")
        files = sorted(path for path in (tmp_path / name).rglob("*") if path.is_file())
        digests.append([(path.relative_to(tmp_path / name), hashlib.sha256(path.read_bytes()).hexdigest()) for path in files])
    assert digests[0] == digests[1] and len(digests[0]) == 13


def optg(*args: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "optg", "report", *map(str, args)], capture_output=True, text=True)


def test_the_command(tmp_path):
    write_run(tmp_path / "runs" / "a")
    done = optg(tmp_path / "runs" / "a", "--output", tmp_path / "out", "--title", "Mine & yours")
    assert done.returncode == 0 and done.stdout == f"{tmp_path / 'out' / 'index.html'}\n" and done.stderr == ""
    assert "<title>Mine &amp; yours</title>" in (tmp_path / "out" / "index.html").read_text()


def test_the_command_refuses_a_damaged_run_in_one_line(tmp_path):
    (write_run(tmp_path / "runs" / "a") / "summary.json").write_text("{")
    done = optg(tmp_path / "runs", "--output", tmp_path / "out")
    assert done.returncode == 2 and "summary.json is damaged" in done.stderr and len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_damaged_runs_are_left_out_and_named_if_others_are_intact(tmp_path):
    (write_run(tmp_path / "runs" / "a") / "summary.json").write_text("{")
    (write_run(tmp_path / "runs" / "b") / "model.safetensors").write_bytes(b"no weights")
    write_run(tmp_path / "runs" / "c", "rigl")
    done = optg(tmp_path / "runs", "--output", tmp_path / "out")
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    for said in ("index.html leaves out 2 damaged runs", "a/summary.json", "b/model.safetensors", "optg verify RUN"):
        assert said in done.stderr
    page = (tmp_path / "out" / "index.html").read_text()
    assert "train --method rigl" in page and "train --method optg" not in page
    named = optg(tmp_path / "runs" / "a", tmp_path / "runs" / "c", "--output", tmp_path / "other")
    assert named.returncode == 2 and not (tmp_path / "other").exists()  # a run that the user names must be readable


def test_an_output_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "out").write_text("mine")
    with pytest.raises(ValueError, match="out is a file; give a folder"):
        render(tmp_path / "out", write_run(tmp_path / "a"))
    assert (tmp_path / "out").read_text() == "mine"
