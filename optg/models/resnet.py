"""ResNet: Deep Residual Learning for Image Recognition. He et al., 2016 (arXiv:1512.03385).

Layers have torchvision's names, so that checkpoints of its `resnet50` can be loaded. The last norm of each residual branch
starts at 1, not at 0 as in some later recipes, so that all weights get a gradient, and a score, from the first step.
"""

from collections import OrderedDict

from torch import Tensor, nn
from torch.nn import functional as F

from optg.models.layers import conv, conv_norm_relu, kaiming


class BasicBlock(nn.Module):
    """Two 3×3 convolutions and a shortcut without parameters (the paper's option A)."""

    expansion = 1  # outputs / width

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = conv(inputs, width, 3, stride), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = conv(width, width, 3), nn.BatchNorm2d(width)
        self.stride, self.new_channels = stride, width - inputs

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        return F.relu(y + self.shortcut(x))

    def shortcut(self, x: Tensor) -> Tensor:
        if not self.new_channels:
            return x
        # take every second pixel, and zeros for the new channels
        return F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.new_channels))


class ProjectedBlock(BasicBlock):
    """A basic block whose shortcut is a projection where the shape changes (option B), as in torchvision's ResNet-18."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__(inputs, width, stride)
        self.downsample: nn.Module = nn.Identity()
        if inputs != width or stride != 1:
            self.downsample = nn.Sequential(conv(inputs, width, 1, stride), nn.BatchNorm2d(width))

    def shortcut(self, x: Tensor) -> Tensor:
        return self.downsample(x)


class Bottleneck(nn.Module):
    """1×1, 3×3 and 1×1 convolutions and a shortcut, which is a projection where the shape changes (option B).

    The 3×3 convolution has the stride ("v1.5", as in torchvision), not the first 1×1 as in the paper.
    """

    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = self.expansion * width
        self.conv1, self.bn1 = conv(inputs, width, 1), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = conv(width, width, 3, stride), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = conv(width, outputs, 1), nn.BatchNorm2d(outputs)
        self.downsample: nn.Module = nn.Identity()
        if inputs != outputs or stride != 1:
            self.downsample = nn.Sequential(conv(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        y = F.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        return F.relu(y + self.downsample(x))


def resnet(
    block: type[BasicBlock] | type[Bottleneck], depths: tuple[int, ...], width: int, classes: int, small_images: bool
) -> nn.Sequential:
    """Return a stem, stages of blocks, and a classifier. Each stage doubles the width and halves height and width of images."""
    parts = OrderedDict[str, nn.Module]()
    if small_images:
        parts["conv1"], parts["bn1"], parts["relu"] = conv_norm_relu(3, width)
    else:
        parts["conv1"], parts["bn1"], parts["relu"] = conv_norm_relu(3, width, kernel=7, stride=2)
        parts["maxpool"] = nn.MaxPool2d(3, stride=2, padding=1)
    inputs, stride = width, 1
    for stage, depth in enumerate(depths, start=1):
        blocks = []
        for _ in range(depth):
            blocks.append(block(inputs, width, stride))
            inputs, stride = block.expansion * width, 1
        parts[f"layer{stage}"] = nn.Sequential(*blocks)
        width, stride = 2 * width, 2
    parts["avgpool"], parts["flatten"] = nn.AdaptiveAvgPool2d(1), nn.Flatten()
    parts["fc"] = nn.Linear(inputs, classes)
    return kaiming(nn.Sequential(parts), "fan_out")


def resnet_cifar(depth: int, classes: int = 10) -> nn.Sequential:
    """Return one of the paper's ResNets for 32×32 images (Section 4.2), with 6n + 2 layers: 20, 32, 44, 56, 110."""
    if depth < 8 or depth % 6 != 2:
        raise ValueError(f"depth is {depth}; expected 6n + 2, such as 20 or 56")
    return resnet(BasicBlock, (depth // 6,) * 3, 16, classes, small_images=True)


def resnet18(classes: int = 1000, *, small_images: bool = False) -> nn.Sequential:
    """ResNet-18 for 224×224 images: 11.7M parameters, 1.8G FLOPs.

    Args:
        small_images: start with a 3×3 convolution of stride 1 and no pooling, for 32×32 images: 11.2M parameters, 0.56G FLOPs.
    """
    return resnet(ProjectedBlock, (2, 2, 2, 2), 64, classes, small_images)


def resnet50(classes: int = 1000, *, small_images: bool = False) -> nn.Sequential:
    """ResNet-50 for 224×224 images: 25.6M parameters, 4.09G FLOPs.

    Args:
        small_images: start with a 3×3 convolution of stride 1 and no pooling, for 32×32 images: 23.5M parameters, 1.3G FLOPs.
    """
    return resnet(Bottleneck, (3, 4, 6, 3), 64, classes, small_images)
