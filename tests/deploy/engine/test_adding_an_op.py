"""Adding an operation to the engine takes one Python file and one C function: this file, and the C code below."""

from collections.abc import Iterator
from ctypes import Structure, c_float
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import nn

import optg
from optg.deploy.engine.lower import Lowering
from optg.deploy.engine.ops import RULES
from optg.deploy.engine.ops.base import Op, arguments, lowers
from optg.deploy.graph import Node

C_CODE = """
typedef struct { float limit; } shrinking;

void op_hardshrink(const context *c, const step *s) {
  const float limit = ((const shrinking *)s->own)->limit;
  const char *in = at(c, &s->in);
  char *out = at(c, &s->out);
  int64_t first, last;
  share(c, s->channels, &first, &last);
  for (int64_t o = first; o < last; o++) {
    for (int64_t r = 0; r < s->rows; r++)
      for (int64_t w = 0; w < s->columns; w++) {
        const vec x = *(const vec *)(in + o * s->in.channel + r * s->in.row + w * BYTES);
        *(vec *)(out + o * s->out.channel + r * s->out.row + w * BYTES) =
            choose((x > splat(limit)) | (x < splat(-limit)), x, splat(0));
      }
    fill_halo(&s->halo, out + o * s->out.channel);
  }
}
"""


class ShrinkStruct(Structure):
    _fields_ = [("limit", c_float)]


@dataclass
class HardShrink(Op):
    """x where |x| > limit, else 0."""

    limit: float
    function: ClassVar[str] = "hardshrink"

    def parameters(self) -> Structure:
        return ShrinkStruct(self.limit)


@pytest.fixture
def hardshrink(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(HardShrink, "source", tmp_path / "hardshrink.c")
    (tmp_path / "hardshrink.c").write_text(C_CODE)

    @lowers("hardshrink")
    def rule(lowering: Lowering, node: Node) -> None:
        x, limit = arguments(node, input=None, lambd=0.5)
        lowering.emit(HardShrink(node.name, [lowering.value(x)], limit=float(limit)))

    yield
    del RULES["hardshrink"]


def network() -> nn.Module:
    """Return a net in which the new operation reads a padded convolution, and another operation reads its halo."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Hardshrink(0.3), nn.Conv2d(8, 6, 3, padding=1),
        nn.Hardshrink(0.1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 4),
    ).eval()  # fmt: skip


@pytest.mark.parametrize("threads", [1, 2])
def test_the_engine_runs_the_new_op(hardshrink: None, threads: int) -> None:
    model = network()
    fast = optg.compile(model, torch.randn(1, 3, 12, 10), threads=threads)
    assert not fast.notes and "hardshrink" in repr(fast)
    for batch in (1, 3, 16, 17):
        x = torch.randn(batch, 3, 12, 10)
        with torch.no_grad():
            torch.testing.assert_close(fast(x), model(x), rtol=1e-5, atol=1e-5)


def test_torch_runs_an_op_that_the_engine_does_not_have() -> None:
    fast = optg.compile(network(), torch.randn(1, 3, 12, 10))
    assert any("hardshrink" in note and "runs in torch" in note for note in fast.notes)


def test_a_missing_c_function_is_named(hardshrink: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HardShrink, "function", "softshrink")
    with pytest.raises(LookupError, match="no C function op_softshrink; expected it in a file of c/ops/"):
        optg.compile(network(), torch.randn(1, 3, 12, 10))
