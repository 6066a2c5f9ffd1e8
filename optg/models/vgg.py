"""VGG: Very Deep Convolutional Networks for Large-Scale Image Recognition. Simonyan & Zisserman, 2015 (arXiv:1409.1556).

This is the variant that papers on sparsity train on CIFAR: batch norm after each convolution, and one linear classifier.
"""

from torch import nn

from optg.models.layers import classifier, conv_norm_relu, kaiming

STAGES = ((64, 2), (128, 2), (256, 4), (512, 4), (512, 4))  # width, convolutions; max pooling between stages


def vgg19(classes: int = 10, *, fifth_maxpool: bool = False) -> nn.Sequential:
    """VGG-19 for 32×32 images: 20.04M parameters, 398M FLOPs.

    Args:
        fifth_maxpool: take the maximum of the last 2×2 pixels, as OptG's authors do, instead of their average.
    """
    layers: list[nn.Module] = []
    inputs = 3
    for width, convolutions in STAGES:
        for _ in range(convolutions):
            layers += conv_norm_relu(inputs, width)
            inputs = width
        layers.append(nn.MaxPool2d(2))
    if not fifth_maxpool:
        layers.pop()
    return kaiming(classifier(layers, inputs, classes), "fan_in")
