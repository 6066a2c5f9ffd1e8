"""Parts of the benchmarks that need no GPU: what they print, and how they continue."""

import importlib
import json
import sys
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

OLD = (  # a line of the time before CUDA graphs
    '{"inputs": 1024, "outputs": 2048, "rows": 64, "dtype": "bf16", "microseconds": {"dense": 19.0, "2:4": 480.0, '
    '"dense compiled": 25.0, "2:4 compiled": 400.0}, "dense": "dense", "sparse": "2:4 compiled", "pays": 0.05, '
    '"quartiles": [0.04, 0.06], "error": 0.004}'
)


@pytest.fixture
def semi_structured(monkeypatch: pytest.MonkeyPatch) -> Any:
    return load("semi_structured", monkeypatch)


def load(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    return importlib.import_module(name)


def with_graph(module: Any) -> Any:
    fields = json.loads(OLD)
    fields["microseconds"] |= {"dense graph": 5.0, "2:4 graph": 4.0}
    return module.Result(**fields, graph_pays=1.25, graph_quartiles=(1.2, 1.3))


def test_the_table_shows_both_ratios(semi_structured: Any) -> None:
    old, new = semi_structured.Result(**json.loads(OLD)), with_graph(semi_structured)
    header = semi_structured.HEADER.splitlines()
    bars = [[place for place, sign in enumerate(line) if sign == "│"] for line in (*header, str(old), str(new))]
    assert bars[0] == bars[1] == bars[2] == bars[3] and len(bars[0]) == 3
    cells = [cell.split() for cell in str(new).split("│")]
    assert cells[:2] == [["1024", "2048", "64"], ["19.0", "400.0", "0.05", "0.04–0.06"]]
    assert cells[2] == ["5.0", "4.0", "1.25", "1.20–1.30"]
    assert str(old).split("│")[2].strip() == "not measured" and str(old).split("│")[3] == str(new).split("│")[3]


def test_known_shapes_are_not_measured_again(
    semi_structured: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file, measured = tmp_path / "found.jsonl", []

    def measure(inputs: int, outputs: int, rows: int, options: Any) -> Any:
        measured.append((inputs, outputs, rows))
        return semi_structured.Result(**asdict(with_graph(semi_structured)) | {"inputs": inputs, "outputs": outputs})

    file.write_text(OLD + "\n")
    monkeypatch.setattr(semi_structured, "measure", measure)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "A GPU")
    monkeypatch.setattr(sys, "argv", ["x", "--features", "1024", "2048", "--rows", "64", "--output", str(file)])
    for _ in range(2):
        semi_structured.main()
        assert measured == [(1024, 1024, 64), (2048, 1024, 64), (2048, 2048, 64)]
        printed = capsys.readouterr().out
        assert "2:4 pays for 0 of 4 shapes as called" in printed and "for 3 of 3 shapes in a CUDA graph" in printed
    assert len(file.read_text().splitlines()) == 4


def test_a_variant_that_fails_does_not_stop_the_others(
    semi_structured: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def in_graph(module: nn.Module, x: Tensor, repeats: int) -> Any:
        if isinstance(module, nn.Linear):
            return module
        try:
            raise RuntimeError("the plan cannot be captured\nbacktrace")
        finally:
            raise RuntimeError("the capture failed")

    def compiled(module: nn.Module, dynamic: bool) -> Any:
        if isinstance(module, nn.Linear):
            raise ValueError("unknown layout")
        return module

    monkeypatch.setattr(semi_structured, "semi_structured", lambda model: (model, {"0": "2:4"}))
    monkeypatch.setattr(semi_structured, "in_graph", in_graph)
    monkeypatch.setattr(torch, "compile", compiled)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    working = semi_structured.variants(nn.Linear(4, 4), torch.zeros(2, 4), 3)
    assert [*working] == ["dense", "2:4", "2:4 compiled", "dense graph"]
    printed = capsys.readouterr().out.splitlines()
    assert printed == [
        "dense compiled fails: ValueError: unknown layout",
        "2:4 graph fails: RuntimeError: the plan cannot be captured",
    ]


def test_a_graph_is_called_once_in_a_turn(semi_structured: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    event = SimpleNamespace(record=lambda: None, synchronize=lambda: None, elapsed_time=lambda end: 0.06)
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: event)
    calls: list[str] = []
    variants = {name: (lambda x, name=name: calls.append(name)) for name in ("2:4", "2:4 graph")}
    times = semi_structured.time_in_turns(variants, torch.zeros(1), turns=2, repeats=3)
    assert times == {name: [pytest.approx(20)] * 2 for name in variants}
    assert calls.count("2:4") == 2 * (1 + 3) and calls.count("2:4 graph") == 2 * (1 + 1)


def test_the_shrunk_benchmark_compares_multiples(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    shrunk = load("shrunk", monkeypatch)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 36, 5))
    assert shrunk.activations(net, torch.zeros(1, 3, 8, 8)) == (3 * 64 + 4 * 36) + (4 * 36 + 5)
    arguments = "x --model resnet20 --size 32 --batch 2 --calls 1 --rounds 1 --multiples 1 8"
    monkeypatch.setattr(sys, "argv", arguments.split())
    threads = torch.get_num_threads()
    shrunk.main()
    torch.set_num_threads(threads)
    rows = capsys.readouterr().out.splitlines()
    assert [row[:15].strip() for row in rows] == ["model", "dense", "multiples of 1", "multiples of 8"]
    dense, one, eight = (float(row[45:].split()[0].removeprefix("1/")) for row in rows[1:])
    assert dense == 1 < eight < one  # fewer FLOPs without a multiple
