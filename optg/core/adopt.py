"""optg.masks_from: take over a model that another tool has pruned.

masks = optg.masks_from(model)                            # the model now has plain parameters, 0 where they were masked
optg.sparsify(model, optimizer, method="keep")            # fine-tune it; its zeros stay
"""

import warnings

from torch import Tensor, nn
from torch.nn.utils import prune

from optg.core.prunable import find_prunable, unwrap


def masks_from(model: nn.Module) -> dict[str, Tensor]:
    """Make the masks of `torch.nn.utils.prune` permanent, and return a mask for each weight that has zeros.

    A masked parameter becomes a plain one again: `weight_orig`, `weight_mask` and the hook that multiplies them go, and
    `weight` is 0 wherever it was masked. The values that `weight_orig` had there are lost. It stays the same Parameter, so an
    optimizer that holds it need not be made again.

    Returns a mask for each prunable weight with zeros, from whatever source, by name: True where the weight is not 0. This
    is what `method="keep"` keeps.
    """
    unmasked = []
    for prefix, module in unwrap(model).named_modules():
        hooks = [hook for hook in module._forward_pre_hooks.values() if isinstance(hook, prune.BasePruningMethod)]
        for hook in hooks:
            prune.remove(module, hook._tensor_name)
            unmasked.append(f"{prefix}.{hook._tensor_name}" if prefix else hook._tensor_name)
    weights = find_prunable(model, None, ())
    if others := [name for name in unmasked if name not in weights]:
        warnings.warn(
            f"{', '.join(others[:3])}{' …' if len(others) > 3 else ''} had a mask, but optg prunes weights only, not biases, "
            "norms or frozen parameters: further training may change these zeros",
            stacklevel=2,
        )
    masks = {name: weight.detach() != 0 for name, weight in weights.items()}
    return {name: mask for name, mask in masks.items() if not mask.all()}
