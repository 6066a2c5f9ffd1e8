"""The benchmark: what it measures is true to the model, and what it shows is what it measured."""

import json
from io import StringIO
from pathlib import Path

import pytest
import torch
from rich.console import Console

from optg.core.accounting import count
from optg.deploy import bench, packed
from optg.deploy.bench import ENGINES, Engine, Subject
from optg.deploy.graph import capture
from optg.deploy.packed import About
from optg.deploy.timings import Report, Timing, draw, table, verdicts
from tests.deploy.nets import captured
from tests.deploy.test_export import Cli, cli  # noqa: F401


def timing(engine: str, milliseconds: float, batch: int = 1, threads: int = 1) -> Timing:
    return Timing(engine, threads, batch, milliseconds, 0.9 * milliseconds, 1.2 * milliseconds, 7, 1e-7)


SUBJECT = {"name": "[a]", "packed_bytes": 2, "dense_bytes": 100, "parameters": 9, "nonzero": 3, "flops": 5, "dense_flops": 7}
REPORT = Report(
    SUBJECT,
    "a CPU, 2 cores",
    {"torch": "2"},
    [
        *(timing("optg", 1.0), timing("torch", 8.0), timing("onnxruntime", 3.0), timing("openvino bf16", 0.5)),
        *(timing("optg", 4.0, 32, 2), timing("torch", 2.0, 32, 2)),
    ],
)


def test_the_command_measures_and_writes(cli: Cli, tmp_path: Path) -> None:  # noqa: F811
    args = ("--engines", "optg", "torch", "--batches", "1", "3", "--threads", "1", "--seconds", "0.05")
    code, out, err = cli("bench", "digits", "--sparsity", "0.95", *args, "--output", "b.json", "--plot", "b.png")
    assert code == 0 and not err
    assert "digits with random weights and random ERK masks of sparsity 0.95" in out and "batch 3, 1 thread" in out
    assert "the best other in float32" in out
    found = json.loads((tmp_path / "b.json").read_text())
    assert [(t["engine"], t["batch"], t["threads"]) for t in found["timings"]] == [
        *(("optg", 1, 1), ("torch", 1, 1), ("optg", 3, 1), ("torch", 3, 1)),
    ]
    for t in found["timings"]:
        assert 0 < t["low"] <= t["milliseconds"] <= t["high"] and t["calls"] >= 5 and t["difference"] < 1e-5
        assert t["images_per_second"] == pytest.approx(1000 * t["batch"] / t["milliseconds"])
    assert found["subject"]["parameters"] == 98_026 and found["subject"]["nonzero"] == 98_026 - 92_690
    assert found["subject"]["packed_bytes"] < 0.1 * found["subject"]["dense_bytes"]
    assert (tmp_path / "b.png").read_bytes().startswith(b"\x89PNG")


def test_wrong_use_gets_one_line(cli: Cli, tmp_path: Path) -> None:  # noqa: F811
    (tmp_path / "text").write_text("no model")
    for args, message in (
        (("no-such-model",), "unknown model 'no-such-model'"),
        (("runs/none",), "there is no runs/none"),
        (("text",), "not a packed model"),
        (("digits", "--batches", "0"), "--batches is 0; expected"),
        (("digits", "--threads", "-1"), "--threads is -1; expected"),
        (("digits", "--seconds", "0"), "--seconds is 0; expected above 0"),
        (("digits", "--sparsity", "1"), "--sparsity is 1; expected"),
        (("text", "--sparsity", "0.5"), "text is measured as it is; leave out --sparsity"),
        (("digits", "--shape", "3", "8", "8"), "digits does not take images of 3×8×8; give another --shape"),
        (("digits", "--engines", "onnxruntim"), "unknown engine 'onnxruntim'; did you mean 'onnxruntime'?"),
        (("digits", "--plot", "a.txt"), "should end in .png, .svg or .pdf"),
        (("digits", "--output", "no/a.json"), "there is no folder no"),
    ):
        code, out, err = cli("bench", *args)
        assert code == 2 and message in err and err.count("\n") == 1 and not out.strip(), (args, err)


def test_random_masks_are_as_sparse_as_asked_and_activations_of_a_usual_size() -> None:
    trained = bench.open_subject(Subject("resnet20", 0.98))
    account = count(trained.model, trained.example)
    weights = sum(torch.Size(layer.shape).numel() for layer in account.layers)
    assert sum(layer.nonzero for layer in account.layers) == weights - -(-98 * weights // 100)
    assert trained.about.shape == (3, 32, 32) and trained.about.account["flops"] == account.flops
    with torch.no_grad():
        assert 0.05 < trained.model(torch.randn(4, 3, 32, 32)).std() < 20
    assert bench.usual_classes("resnet50") == bench.usual_classes("timm:x") == 1000 and bench.usual_classes("vgg19") == 10


def test_a_packed_file_is_measured_as_what_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.optg"
    account = {"parameters": 98_026, "nonzero": 3_000, "flops": 10, "dense_flops": 20}
    size = packed.save(path, captured("digits"), About("digits", 10, (1, 8, 8), account=account))
    about = bench.describe(bench.open_subject(Subject(str(path))))
    assert about == {"name": "digits", "packed_bytes": size, "dense_bytes": 393_920, **account}


def test_an_engine_that_fails_or_is_wrong_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(place: bench.Place) -> bench.Network:
        raise RuntimeError("no such instruction\nand more")

    def wrong(place: bench.Place) -> bench.Network:
        return lambda images: 1.5 * place.trained.model(images)

    engines = (
        Engine("torch", bench.as_torch),
        Engine("fails", fails),
        Engine("wrong", wrong),
        Engine("absent", fails, ("no_such",)),
    )
    monkeypatch.setattr(bench, "ENGINES", engines)
    monkeypatch.setattr(bench, "ROUNDS", 2)
    timings, notes = bench.measure(Subject("digits"), [], [2], 1, 0.01)
    assert [t.engine for t in timings] == ["torch", "wrong"]
    assert timings[0].difference == 0 and timings[1].difference == pytest.approx(0.5)
    assert notes == [
        "absent is not installed: pip install no_such",
        "fails failed at batch 2: RuntimeError: no such instruction",
    ]


@pytest.mark.parametrize("engine", [e for e in ENGINES if e.packages], ids=lambda e: e.name)
def test_other_engines_compute_the_same(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in engine.packages:
        pytest.importorskip(package)
    monkeypatch.setattr(bench, "ROUNDS", 1)
    (found,), notes = bench.measure(Subject("digits"), [engine.name], [3], 1, 0.01)
    assert found.difference < (0.05 if "bf16" in engine.name else 1e-5) and not notes


def test_turns_are_shared_out_evenly(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def network(name: str) -> bench.Network:
        def call(images: torch.Tensor) -> torch.Tensor:
            calls.append(name)
            return images

        return call

    monkeypatch.setattr(bench, "turn", lambda network, images: [float(network(images).sum())])
    images = torch.ones(2, 3)
    timings = list(bench.time_in_turns({n: network(n) for n in "abc"}, images, images, 1, 0.0))
    rounds = [calls[i : i + 3] for i in range(0, 3 * bench.ROUNDS, 3)]
    assert all(sorted(r) == ["a", "b", "c"] for r in rounds) and len({tuple(r) for r in rounds}) > 1
    assert [(t.engine, t.milliseconds, t.calls) for t in timings] == [(n, 6.0, bench.ROUNDS) for n in "abc"]


def test_the_table_shows_what_was_measured() -> None:
    console = Console(width=80, record=True, file=StringIO())
    console.print(table(REPORT))
    text = console.export_text()
    assert "[a]: 0.000 MB packed, 2.00% of" in text and "3 of 9 parameters" in text and "a CPU, 2 cores" in text
    rows = [line.split() for line in text.splitlines()]
    assert ["optg", "1.000", "0.900–1.200", "1,000", "8.00", "1e-07"] in rows
    assert ["optg", "4.000", "3.600–4.800", "8,000", "0.50", "1e-07"] in rows
    assert list(verdicts(REPORT)) == [  # bf16 is not what float32 is measured against
        "batch 1, 1 thread: optg is 3.00 × as fast as onnxruntime, the best other in float32",
        "batch 32, 2 threads: optg is 0.50 × as fast as torch, the best other in float32",
    ]


def test_the_figure_has_a_bar_for_each_engine(tmp_path: Path) -> None:
    draw(REPORT, tmp_path / "b.svg")
    assert (tmp_path / "b.svg").read_text().count("</svg>") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["b.svg"]


def test_a_model_of_ones_own_is_captured_for_its_size() -> None:
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 3))
    trained = bench.Trained(model, About("own", 3, (3, 2, 2), account=bench.account_of(model, torch.zeros(1, 3, 2, 2))))
    about = bench.describe(trained)
    assert about["dense_bytes"] == 4 * (36 + 3) and about["flops"] == 36
    assert about["packed_bytes"] == len(packed.pack(capture(model, trained.example), trained.about))
