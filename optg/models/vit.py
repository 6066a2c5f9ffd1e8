"""ViT: An Image is Worth 16×16 Words. Dosovitskiy et al., 2021 (arXiv:2010.11929); sizes Ti and S of DeiT (arXiv:2012.12877).

The image is cut into patches, each a token. Pre-norm encoder layers follow, and a linear layer classifies the class token.
"""

import torch
from torch import Tensor, nn


class ViT(nn.Module):
    def __init__(self, image: int, patch: int, width: int, heads: int, classes: int, depth: int = 12) -> None:
        super().__init__()
        self.image = image  # height and width
        self.patches = nn.Conv2d(3, width, patch, stride=patch)
        self.class_token = nn.Parameter(torch.empty(1, 1, width))
        self.positions = nn.Parameter(torch.empty(1, 1 + (image // patch) ** 2, width))
        options = {"dropout": 0.0, "activation": "gelu", "layer_norm_eps": 1e-6, "batch_first": True, "norm_first": True}
        # nn.TransformerEncoder would copy one layer, so that all layers start with the same weights.
        self.blocks = nn.Sequential(
            *(nn.TransformerEncoderLayer(width, heads, 4 * width, **options) for _ in range(depth))  # type: ignore[arg-type]
        )
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.head = nn.Linear(width, classes)
        self.initialize()

    def initialize(self) -> None:
        """Initialise as DeiT does: narrow normal weights, zero biases. The patch embedding keeps torch's initialisation."""
        nn.init.trunc_normal_(self.class_token, std=0.02)
        nn.init.trunc_normal_(self.positions, std=0.02)
        for name, p in [*self.blocks.named_parameters(), *self.head.named_parameters()]:
            if p.ndim == 2:
                nn.init.trunc_normal_(p, std=0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(p)

    def forward(self, images: Tensor) -> Tensor:
        if images.shape[-2:] != (self.image, self.image):
            height, width = images.shape[-2:]
            raise ValueError(f"images are {height}×{width}; this ViT expects {self.image}×{self.image}")
        tokens = self.patches(images).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.class_token.expand(images.shape[0], -1, -1), tokens], 1)
        tokens = self.blocks(tokens + self.positions)
        return self.head(self.norm(tokens[:, 0]))


def vit_s(classes: int = 1000) -> ViT:
    """ViT-S/16 for 224×224 images: 22.1M parameters, 4.24G FLOPs."""
    return ViT(image=224, patch=16, width=384, heads=6, classes=classes)


def vit_ti_cifar(classes: int = 10) -> ViT:
    """ViT-Ti, with patches of 4×4 pixels for 32×32 images: 5.36M parameters, 0.35G FLOPs."""
    return ViT(image=32, patch=4, width=192, heads=3, classes=classes)
