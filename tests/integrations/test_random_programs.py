"""Each random program ends with the promised zeros in the weights that forward really uses, or says what went wrong."""

import math
import re
import traceback
import warnings
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch

import optg
from optg.methods import METHODS
from tests.integrations.families import MODELS
from tests.integrations.random_programs import FEATURES, OPTIMIZERS, SPARSITY, Program
from tests.integrations.used_weights import UsedWeights

# Each of these says that the model is not as sparse as was asked for.
SAID = re.compile(r"stay dense: |so they stay dense|learns its sparsity")


def check_program(seed: int) -> str:
    program = Program.draw(seed)
    with warnings.catch_warnings(record=True) as caught, TemporaryDirectory() as folder:
        warnings.simplefilter("always")
        try:
            program.run(Path(folder))
        except (FloatingPointError, RuntimeError, TypeError, ValueError) as error:
            assert len(str(error)) > 40, f"{program}: {error!r}"  # a sentence, not a bare exception of torch
            last = traceback.extract_tb(error.__traceback__)[-1].filename
            assert Path(last).is_relative_to(Path(optg.__file__).parent), f"{program}: {error!r} does not come from optg"
            return "refused"
    messages = "\n".join(str(warning.message) for warning in caught)
    model, masks = program.model, program.sparsifier.masks
    matrices = {name: p for name, p in model.named_parameters() if p.ndim > 1}
    with UsedWeights(matrices, model) as used, torch.no_grad():
        model.train().forward(torch.randn(8, 8, 8))  # not compiled
    assert masks.keys() <= used.zero.keys(), program
    assert all(p.isfinite().all() for p in matrices.values()), f"{program} ends with weights that are not finite"
    for name, mask in masks.items():
        assert used.zero[name].reshape(mask.shape)[~mask].all(), f"{program} uses removed weights of {name}"
    if not METHODS[program.method].learns_sparsity:
        removed = sum(int((~mask).sum()) for mask in masks.values())
        assert removed == program.sparsifier.weights.zeros(SPARSITY)[0], program
    said = SAID.search(messages)
    assert said or not used.computed, f"{program} computes weights and does not say that they are dense"
    zeros, size = (sum(int(count(zero)) for zero in used.zero.values()) for count in (torch.sum, torch.numel))
    assert said or zeros >= math.ceil(SPARSITY * size), f"{program}: {zeros} zeros in {size} weights"
    if program.feature == "early checkpoint reloaded":
        assert "removed again" in messages, program
    return "said" if said else "sparse"


@pytest.mark.parametrize("seed", range(20))
def test_a_random_program_is_sparse_or_says_why_not(seed: int) -> None:
    check_program(seed)


@pytest.mark.long
def test_three_hundred_random_programs() -> None:
    drawn = [Program.draw(seed) for seed in range(300)]
    assert {p.family for p in drawn} == MODELS.keys() and {p.optimizer for p in drawn} == OPTIMIZERS.keys()
    assert {p.feature for p in drawn} == set(FEATURES) and len({p.method for p in drawn}) > 20
    outcomes = [check_program(seed) for seed in range(300)]
    assert outcomes.count("sparse") > 120 and outcomes.count("said") > 20 and outcomes.count("refused") > 20
