"""How a dataset's images are normalised, so that a packed file can describe it."""

from typing import Any

from optg.training.recipe import Recipe

CIFAR10_LABELS = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


def preprocessing_of(settings: Recipe, shape: tuple[int, ...]) -> dict[str, Any]:
    """Return mean, std, centre crop and labels of the recipe's dataset, as far as they are known, as fields of `About`."""
    from optg.data import cifar, digits, imagenet, synthetic  # not at the top: imagenet needs pillow

    name = settings.data.partition(":")[0]
    if name == "digits":  # its pixels range from 0 to 16
        labels = tuple(map(str, range(10)))
        return {"mean": (digits.MEAN / 16,), "std": (digits.STD / 16,), "labels": labels}
    if name in cifar.CIFARS:
        kind = cifar.CIFARS[name]
        return {"mean": kind.mean, "std": kind.std, "labels": CIFAR10_LABELS if name == "cifar10" else None}
    if name == "imagenet":
        return {"mean": imagenet.MEAN, "std": imagenet.STD, "centre": imagenet.CENTRE}
    if name == "synthetic":
        return {"mean": (synthetic.MEAN / 255,) * shape[0], "std": (synthetic.STD / 255,) * shape[0]}
    return {}  # the user's own function: its preprocessing is unknown
