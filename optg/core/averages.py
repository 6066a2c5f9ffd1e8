"""Apply masks to another model: an average of weights (EMA, SWA), or a model into which adapters (LoRA) were merged."""

from torch import Tensor, nn

from optg.core.prunable import parameters_by_name, unwrap
from optg.core.sharding import local_piece, to_local


def mask_model(model: nn.Module, masks: dict[str, Tensor]) -> None:
    """Zero the weights of a model that masks with the same names remove."""
    if not isinstance(unwrap(model), nn.Module):
        raise TypeError(
            f"{type(model).__name__} is not an nn.Module; expected a copy of the model. Copy the average into a model first, "
            "for example with ema.copy_to(model.parameters()), then call apply_masks on that model"
        )
    others = parameters_by_name(model)
    for name, mask in masks.items():
        if name not in others or others[name].shape != mask.shape:
            raise ValueError(
                f"the other model has no {name} of shape {tuple(mask.shape)}; expected a copy of this model. If it has "
                "adapters (LoRA), merge adapters first: apply_masks(model.merge_and_unload())"
            )
    for name, mask in masks.items():
        values = to_local(others[name])
        values.masked_fill_(~local_piece(others[name], mask).to(values.device), 0.0)
