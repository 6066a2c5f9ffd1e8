"""2:4 weights become semi-structured tensors on GPUs that have them."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

import optg
from optg.deploy import two_four

needs_sparse_cores = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0), reason="needs a CUDA GPU of capability 8.0"
)


def two_four_(weight: Tensor, seed: int = 0) -> Tensor:
    """Zero two random ones of every four neighbours."""
    g = torch.Generator().manual_seed(seed)
    scores = torch.rand(weight.shape[0], weight.shape[1] // 4, 4, generator=g)
    mask = scores.argsort(-1).argsort(-1) < 2
    with torch.no_grad():
        return weight.mul_(mask.flatten(1).to(weight))


def network(width: int = 128, dtype: torch.dtype = torch.bfloat16) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 64), nn.ReLU(), nn.Linear(64, 10)).to(dtype)
    two_four_(model[0].weight)
    return model


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ([1, 0, 0, 2, 0, 0, 3, 4], True),
        ([0, 0, 0, 0, 0, 5, 0, 0], True),
        ([1, 2, 3, 0, 0, 0, 0, 0], False),
        ([0, 0, 1, 2, 3, 0, 0, 0], True),  # three neighbours, but in two groups
        ([1, 0, 2, 0, 0, 1], False),  # the last group is incomplete
        ([float("nan"), 1, 1, 0], False),
    ],
)
def test_what_counts_as_two_four(row: list[float], expected: bool) -> None:
    assert two_four.is_two_four(torch.tensor([row])) is expected


def test_the_input_dimension_counts() -> None:
    weight = torch.zeros(8, 4)
    weight[:, :2] = 1
    assert two_four.is_two_four(weight) and not two_four.is_two_four(weight.T.contiguous())


@pytest.mark.parametrize(
    ("shape", "dtype", "reason"),
    [
        ((32, 64), torch.bfloat16, ""),
        ((96, 192), torch.float16, ""),
        ((32, 64), torch.float32, "its weight is float32; 2:4 needs float16 or bfloat16"),
        ((10, 64), torch.float16, "its weight is 10×64; outputs must be a multiple of 32, inputs of 64"),
        ((32, 96), torch.float16, "its weight is 32×96; outputs must be a multiple of 32, inputs of 64"),
    ],
)
def test_shapes_and_types_that_torch_accepts(shape: tuple[int, int], dtype: torch.dtype, reason: str) -> None:
    assert two_four.unsuitable(two_four_(torch.randn(shape).to(dtype))) == reason


def test_the_multiples_satisfy_both_backends_of_torch() -> None:
    for backend in (torch.sparse.SparseSemiStructuredTensorCUTLASS, torch.sparse.SparseSemiStructuredTensorCUSPARSELT):
        for dtype, (rows, columns) in two_four.MULTIPLES.items():
            needed = backend._DTYPE_SHAPE_CONSTRAINTS[dtype]
            assert rows % needed.sparse_min_rows == 0 and columns % needed.sparse_min_cols == 0


def test_every_linear_layer_gets_a_reason() -> None:
    model = nn.ModuleDict(
        {
            "yes": nn.Linear(64, 64),
            "no": nn.Linear(64, 64),
            "tied": nn.Linear(64, 64),
            "attention": nn.MultiheadAttention(64, 2),
            "computed": nn.utils.parametrizations.weight_norm(nn.Linear(64, 64)),
            "conv": nn.Conv2d(64, 64, 1),
        }
    ).half()
    two_four_(model["yes"].weight)
    model["again"] = nn.Linear(64, 64)
    model["again"].weight = model["tied"].weight
    assert {name: reason for name, (_, reason) in two_four.linear_layers(model).items()} == {
        "yes": "",
        "no": "its weight is not 2:4",
        "tied": "it shares its weight with another layer",
        "again": "it shares its weight with another layer",
        "attention.out_proj": "an attention layer reads its weight without calling it",
        "computed": "its weight is computed at every call",
    }


def test_a_model_on_the_cpu_is_refused() -> None:
    with pytest.raises(ValueError, match=r"the model is on cpu; 2:4 tensors need an NVIDIA GPU: model.cuda\(\)"):
        optg.deploy.semi_structured(network())


def test_a_gpu_without_sparse_cores_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = SimpleNamespace(parameters=lambda: [SimpleNamespace(device=torch.device("cuda", 0))])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    with pytest.raises(ValueError, match=r"Tesla T4 has no sparse tensor cores; 2:4 needs compute capability 8.0"):
        optg.deploy.semi_structured(model)  # type: ignore[arg-type]


def test_a_layer_that_torch_refuses_stays_dense() -> None:
    layer = network()[0]  # on the CPU, where torch raises an error
    before = layer.weight
    assert two_four.convert(layer).startswith("torch cannot convert it: ")
    assert layer.weight is before


def test_a_wrong_product_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = network(dtype=torch.float32)[0].requires_grad_(False)
    monkeypatch.setattr(torch.sparse, "to_sparse_semi_structured", lambda dense: dense * 1.1)
    assert "differs by 9.3e-02" in two_four.convert(layer)
    monkeypatch.setattr(torch.sparse, "to_sparse_semi_structured", lambda dense: dense.clone())
    assert two_four.convert(layer) == ""


def test_the_fused_kernel_of_a_transformer_layer_is_avoided(monkeypatch: pytest.MonkeyPatch) -> None:
    """In evaluation mode the layer would pass its weights to one kernel, which knows dense ones only."""

    def fused(*args: object) -> None:
        raise AssertionError("fused")

    layer = nn.TransformerEncoderLayer(64, 2, 128, batch_first=True, dropout=0).eval().requires_grad_(False)
    x = torch.randn(2, 5, 64)
    expected = layer(x)
    monkeypatch.setattr(torch, "_transformer_encoder_layer_fwd", fused)
    two_four.avoid_fast_path(layer, nn.Linear(64, 64))  # a layer from elsewhere changes nothing
    with pytest.raises(AssertionError, match="fused"):
        layer(x)
    two_four.avoid_fast_path(layer, layer.linear2)
    torch.testing.assert_close(layer(x), expected, atol=1e-5, rtol=1e-5)


@needs_sparse_cores
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_converted_models_compute_the_same(dtype: torch.dtype) -> None:
    model = network(dtype=dtype).cuda()
    fast, layers = optg.deploy.semi_structured(model)
    assert layers == {"0": "2:4", "2": "dense: its weight is not 2:4", "4": layers["4"]} and "10×64" in layers["4"]
    assert isinstance(fast[0].weight, torch.sparse.SparseSemiStructuredTensor)
    assert not isinstance(model[0].weight, torch.sparse.SparseSemiStructuredTensor)
    for rows in (1, 8, 100):
        x = torch.randn(rows, 64, device="cuda", dtype=dtype)
        torch.testing.assert_close(fast(x), model(x), atol=2e-2, rtol=2e-2)


@needs_sparse_cores
def test_a_converted_transformer_layer_and_compilation() -> None:
    layer = nn.TransformerEncoderLayer(64, 2, 128, batch_first=True, dropout=0).eval().cuda().bfloat16()
    two_four_(layer.linear1.weight)
    two_four_(layer.linear2.weight)
    fast, layers = optg.deploy.semi_structured(layer)
    assert [layers["linear1"], layers["linear2"]] == ["2:4", "2:4"]
    x = torch.randn(2, 16, 64, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        expected = layer(x)
        torch.testing.assert_close(fast(x), expected, atol=5e-2, rtol=5e-2)
        torch.testing.assert_close(torch.compile(fast)(x), expected, atol=5e-2, rtol=5e-2)
