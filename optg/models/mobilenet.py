"""MobileNet-V1: Efficient Convolutional Neural Networks for Mobile Vision Applications. Howard et al., 2017 (arXiv:1704.04861).

Each convolution is split into a depthwise 3×3, which filters each channel, and a 1×1, which mixes channels.
"""

from torch import nn

from optg.models.layers import classifier, conv_norm_relu, kaiming

BLOCKS = ((64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), *[(512, 1)] * 5, (1024, 2), (1024, 1))  # width, stride


def mobilenet_v1(classes: int = 1000, *, small_images: bool = False) -> nn.Sequential:
    """MobileNet-V1 for 224×224 images: 4.23M parameters, 569M FLOPs.

    Args:
        small_images: the first two of the five strides are 1, so that 32×32 images end as 4×4 and not as 1×1: 176M FLOPs.
    """
    layers, inputs = conv_norm_relu(3, 32, stride=1 if small_images else 2), 32
    for block, (width, stride) in enumerate(BLOCKS):
        stride = 1 if small_images and block == 1 else stride
        layers += conv_norm_relu(inputs, inputs, stride=stride, groups=inputs) + conv_norm_relu(inputs, width, kernel=1)
        inputs = width
    # fan_in, because torch's fan_out of a depthwise convolution counts all channels, though each weight feeds only one.
    return kaiming(classifier(layers, inputs, classes), "fan_in")
