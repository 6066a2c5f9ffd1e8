"""Tables of addresses that the fused passes read."""

import pytest
import torch

from tests.core.passes.fused_device import DEVICE, needs_cuda

from optg.core.passes import fused, tables  # isort: skip  (after fused_device, which skips this file where Triton is missing)

pytestmark = pytest.mark.usefixtures("fused_passes")


def test_masks_from_scores_that_are_not_aligned():
    memory = torch.randn(9001, device=DEVICE)
    assert tables.Tables()([memory[1:]]).align == 1
    masks, threshold = [torch.zeros(9000, dtype=torch.bool, device=DEVICE)], torch.zeros(1, device=DEVICE)
    table = tables.Tables()(masks, [memory[1:]])
    drop = torch.full([1], fused.DROP, device=DEVICE)
    counts = fused.launch_write(table, torch.float32, threshold, drop, tables.index_maps(masks, True))
    assert torch.equal(masks[0], memory[1:] > 0)
    assert counts.tolist() == [[int((memory[1:] <= 0).sum()), 0, int((memory[1:] > 0).sum())]]


def test_lists_of_different_layouts_have_no_table():
    weight = torch.randn(4, 3, 3, 3, device=DEVICE)
    assert tables.Tables()([weight], [weight.to(memory_format=torch.channels_last)]) is None
    assert tables.Tables()([weight[:, :2]]) is None


def test_a_table_used_by_a_cuda_graph_is_never_dropped(monkeypatch):
    cache, tensors = tables.Tables(), [torch.zeros(64, device=DEVICE) for _ in range(40)]
    captured = tables.Table(torch.zeros(3, 1), torch.zeros(1, 1), 16)
    monkeypatch.setattr(cache, "make", lambda lists, capturing: captured)
    used = cache([tensors[0]])
    cache.captured.append(used)
    monkeypatch.undo()
    for tensor in tensors[1:]:
        cache([tensor])
    assert len(cache.tables) == cache.KEPT and used in cache.captured
    again = cache([tensors[-1]])
    assert cache([tensors[-1]]) is again


@needs_cuda
def test_a_table_made_during_capture_is_used_only_by_that_graph():
    graph, masks = torch.cuda.CUDAGraph(), [torch.zeros(64, dtype=torch.bool, device=DEVICE)]
    first, second = [torch.ones(64, device=DEVICE)], [torch.ones(64, device=DEVICE)]
    ours = fused.Passes()
    ours.mask(first, masks)  # the shapes must be known before a capture
    with torch.cuda.graph(graph):
        ours.mask(second, masks)
    ours.mask(second, masks)
    assert not second[0].any()
    second[0].fill_(1.0)
    graph.replay()
    assert not second[0].any()
