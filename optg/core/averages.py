"""Make averages of weights (EMA, SWA) as sparse as the model that they average."""

from torch import Tensor, nn

from optg.core.prunable import parameters_by_name
from optg.core.sharding import local_piece, to_local


def mask_model(model: nn.Module, masks: dict[str, Tensor]) -> None:
    """Apply masks to the weights of another model that have the same names."""
    others = parameters_by_name(model)
    for name, mask in masks.items():
        if name not in others or others[name].shape != mask.shape:
            raise ValueError(f"the other model has no {name} of shape {tuple(mask.shape)}; expected a copy of this model")
    for name, mask in masks.items():
        values = to_local(others[name])
        values.masked_fill_(~local_piece(others[name], mask).to(values.device), 0.0)
