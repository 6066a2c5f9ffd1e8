"""Measure loss and accuracy on the test or validation images."""

import torch
from torch import nn

from optg.data import Data
from optg.training.parallel import Parallel
from optg.training.recipe import Recipe


@torch.no_grad()
def evaluate(model: nn.Module, data: Data, recipe: Recipe, parallel: Parallel, validation: bool = False) -> dict[str, float]:
    """Return the mean loss and the accuracy over all test or validation images. Leaves the model in training mode."""
    model.eval()
    loss, correct, seen = 0.0, 0, 0
    losses, corrects = [], []
    for images, labels in data.validation() if validation else data.test():
        if recipe.channels_last:
            images = images.to(memory_format=torch.channels_last)
        with torch.autocast(images.device.type, torch.bfloat16, enabled=recipe.precision == "bfloat16"):
            outputs = model(images)
        losses.append(nn.functional.cross_entropy(outputs.float(), labels, reduction="sum"))
        corrects.append((outputs.argmax(1) == labels).sum())
        seen += len(labels)
    if losses:  # a single CPU–GPU sync for all batches
        loss, correct = float(torch.stack(losses).double().sum()), int(torch.stack(corrects).sum())
    model.train()
    loss, correct, seen = parallel.sum(loss, correct, seen)  # type: ignore[assignment]
    return {"test_loss": loss / seen, "accuracy": correct / seen}
