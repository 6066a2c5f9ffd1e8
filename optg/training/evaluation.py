"""How well a model names the test images."""

import torch
from torch import nn

from optg.data import Data
from optg.training.parallel import Parallel
from optg.training.recipe import Recipe


@torch.no_grad()
def evaluate(model: nn.Module, data: Data, recipe: Recipe, parallel: Parallel) -> dict[str, float]:
    """Loss and accuracy over all test images, each seen once."""
    model.eval()
    loss, right, seen = 0.0, 0, 0
    losses, rights = [], []
    for images, labels in data.test():
        if recipe.channels_last:
            images = images.to(memory_format=torch.channels_last)
        with torch.autocast(images.device.type, torch.bfloat16, enabled=recipe.precision == "bfloat16"):
            outputs = model(images)
        losses.append(nn.functional.cross_entropy(outputs.float(), labels, reduction="sum"))
        rights.append((outputs.argmax(1) == labels).sum())
        seen += len(labels)
    if losses:  # one sync for all batches
        loss, right = float(torch.stack(losses).double().sum()), int(torch.stack(rights).sum())
    model.train()
    loss, right, seen = parallel.total(loss, right, seen)  # type: ignore[assignment]
    return {"test_loss": loss / seen, "accuracy": right / seen}
