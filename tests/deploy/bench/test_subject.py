"""The model that is measured, and its description."""

from pathlib import Path

import pytest
import torch

from optg.core.accounting import count
from optg.deploy.bench.subject import Subject, describe_subject, open_subject, usual_classes
from optg.deploy.export import Trained, account_of
from optg.deploy.graph import capture
from optg.deploy.packed import About, pack, write_packed
from tests.deploy.nets import captured


def test_random_masks_have_the_requested_sparsity_and_activations_a_realistic_size() -> None:
    trained = open_subject(Subject("resnet20", 0.98))
    account = count(trained.model, trained.example)
    weights = sum(torch.Size(layer.shape).numel() for layer in account.layers)
    assert sum(layer.nonzero for layer in account.layers) == weights - -(-98 * weights // 100)
    assert trained.about.shape == (3, 32, 32) and trained.about.account["flops"] == account.flops
    with torch.no_grad():
        assert 0.05 < trained.model(torch.randn(4, 3, 32, 32)).std() < 20
    assert usual_classes("resnet50") == usual_classes("timm:x") == 1000 and usual_classes("vgg19") == 10


def test_description_of_a_packed_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.optg"
    account = {"parameters": 98_026, "nonzero": 3_000, "flops": 10, "dense_flops": 20}
    size = write_packed(path, captured("digits"), About("digits", 10, (1, 8, 8), account=account))
    about = describe_subject(open_subject(Subject(str(path))))
    assert about == {"name": "digits", "packed_bytes": size, "dense_bytes": 393_920, **account}


def test_description_of_an_unpacked_model() -> None:
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 3))
    trained = Trained(model, About("own", 3, (3, 2, 2), account=account_of(model, torch.zeros(1, 3, 2, 2))))
    about = describe_subject(trained)
    assert about["dense_bytes"] == 4 * (36 + 3) and about["flops"] == 36
    assert about["packed_bytes"] == len(pack(capture(model, trained.example), trained.about))
