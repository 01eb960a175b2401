"""The datasets: every route on small files in its official format, whole and damaged; augmentation."""

import hashlib
import json
import os
import pickle
import shutil
import tarfile
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import medmnist
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch import nn
from torchvision.datasets import CIFAR10, CIFAR100

from paperlib import datasets
from paperlib.datasets import DataError

CIFARS = {"cifar10": CIFAR10, "cifar100": CIFAR100}


def random_images(count, side, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (count, side, side, 3), dtype=np.uint8)


def md5(path):
    return hashlib.md5(path.read_bytes()).hexdigest()


def cut(path, share=0.5):
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])


# ---------------------------------------------------------------- the folder format


def write_folder(root, name="cifar10", count=23, size=8, per_mosaic=10, columns=4, labels=None, **meta):
    """A dataset in the folder format, lossless; the mosaics are filled tile by tile."""
    folder = root / name
    folder.mkdir(parents=True)
    images = random_images(count, size)
    classes = list(datasets.CLASS_NAMES[name])
    labels = np.arange(count) % len(classes) if labels is None else labels
    for start in range(0, count, per_mosaic):
        part = images[start : start + per_mosaic]
        sheet = Image.new("RGB", (columns * size, -(-len(part) // columns) * size))
        for i, image in enumerate(part):
            sheet.paste(Image.fromarray(image), (i % columns * size, i // columns * size))
        sheet.save(folder / f"mosaic_{start // per_mosaic:02d}.webp", lossless=True)
    (folder / "labels.txt").write_text("".join(f"{label}\n" for label in labels))
    content = {
        "name": name,
        "size": size,
        "count": count,
        "per_mosaic": per_mosaic,
        "columns": columns,
        "classes": classes,
        "sha256_images": hashlib.sha256(images.tobytes()).hexdigest(),
    }
    (folder / "meta.json").write_text(json.dumps(content | meta))
    return folder, images, labels


def edit_meta(folder, **changes):
    path = folder / "meta.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change_one_pixel(path):
    with Image.open(path) as image:
        pixels = np.array(image)
    pixels[3, 5, 1] ^= 1
    Image.fromarray(pixels).save(path, lossless=True)


@pytest.mark.parametrize("name", ["cifar10", "cifar100", "dermamnist", "aptos"])
def test_folder_is_read_back(tmp_path, name):
    _, images, labels = write_folder(tmp_path, name)
    dataset = datasets.load(name, tmp_path)
    np.testing.assert_array_equal(dataset.images, images)
    np.testing.assert_array_equal(dataset.labels, labels)
    assert dataset.labels.dtype == np.int64
    assert repr(dataset) == f"<{name}: 23 images of 8 x 8 x 3; folder format, checksum verified>"
    assert dataset.groups is None


def test_folder_with_lesions_and_without_checksum(tmp_path):
    lesions = [f"lesion_{i // 2}" for i in range(23)]
    write_folder(tmp_path, "dermamnist", lesion_ids=lesions, sha256_images=None)
    dataset = datasets.load("dermamnist", tmp_path)
    assert dataset.groups.tolist() == lesions
    assert not dataset.verified
    assert datasets.check("dermamnist", tmp_path)["groups"] == 12


def test_folder_with_one_full_mosaic(tmp_path):
    _, images, _ = write_folder(tmp_path, count=8, per_mosaic=8, columns=4)
    np.testing.assert_array_equal(datasets.load("cifar10", tmp_path).images, images)


FOLDER_DAMAGE = {
    "mosaic missing": (lambda f: (f / "mosaic_01.webp").unlink(), "mosaic_01.webp: the file is missing"),
    "mosaic too many": (
        lambda f: shutil.copy(f / "mosaic_00.webp", f / "mosaic_03.webp"),
        "mosaic_03.webp: one mosaic too many",
    ),
    "mosaic truncated": (lambda f: cut(f / "mosaic_01.webp"), "mosaic_01.webp: the image cannot be decoded"),
    "mosaic empty": (lambda f: cut(f / "mosaic_00.webp", 0), "mosaic_00.webp: the image cannot be decoded"),
    "mosaic of the wrong width": (
        lambda f: Image.new("RGB", (33, 24)).save(f / "mosaic_00.webp", lossless=True),
        "mosaic_00.webp: 33 x 24 pixels cannot hold 10 images of 8 px, 4 to a row",
    ),
    "mosaic too short": (
        lambda f: Image.new("RGB", (32, 16)).save(f / "mosaic_00.webp", lossless=True),
        "mosaic_00.webp: 32 x 16 pixels cannot hold 10 images",
    ),
    "one pixel changed": (
        lambda f: change_one_pixel(f / "mosaic_01.webp"),
        "the SHA-256 of the decoded images is not meta.json's",
    ),
    "labels missing": (lambda f: (f / "labels.txt").unlink(), "labels.txt: the file is missing"),
    "label out of range": (
        lambda f: (f / "labels.txt").write_text("0\n" * 3 + "10\n" + "0\n" * 19),
        r"labels.txt: line 4 must be a class index 0..9, got '10'",
    ),
    "label negative": (lambda f: (f / "labels.txt").write_text("-1\n" * 23), "labels.txt: line 1 must be"),
    "label not a number": (lambda f: (f / "labels.txt").write_text("0\ncat\n"), "labels.txt: line 2 must be"),
    "label file binary": (lambda f: (f / "labels.txt").write_bytes(b"\xff"), "labels.txt: line 1 must be"),
    "labels too few": (lambda f: (f / "labels.txt").write_text("0\n" * 22), "labels.txt: 22 labels, but"),
    "labels too many": (lambda f: (f / "labels.txt").write_text("0\n" * 24), "labels.txt: 24 labels, but"),
    "meta missing": (lambda f: (f / "meta.json").unlink(), "meta.json: the file is missing"),
    "meta truncated": (lambda f: cut(f / "meta.json"), "meta.json: not valid JSON"),
    "meta no object": (lambda f: (f / "meta.json").write_text("[]"), "meta.json: must hold a JSON object"),
    "wrong size": (lambda f: edit_meta(f, size=16), "mosaic_00.webp: 32 x 24 pixels cannot hold"),
    "size not a number": (lambda f: edit_meta(f, size="8"), "size must be a positive integer, got '8'"),
    "count zero": (lambda f: edit_meta(f, count=0), "count must be a positive integer, got 0"),
    "columns missing": (lambda f: edit_meta(f, columns=None), "columns must be a positive integer, got None"),
    "other dataset": (
        lambda f: edit_meta(f, name="cifar100"),
        "the dataset is 'cifar100', expected 'cifar10'",
    ),
    "classes in another order": (
        lambda f: edit_meta(f, classes=sorted(datasets.CLASS_NAMES["cifar10"], reverse=True)),
        "classes must be those of cifar10",
    ),
    "lesions too few": (lambda f: edit_meta(f, lesion_ids=["a"]), "groups has 1 entries, but images has 23"),
    "lesions no list": (lambda f: edit_meta(f, lesion_ids="abc"), "lesion_ids must be a list"),
}


@pytest.mark.parametrize("damage", FOLDER_DAMAGE)
def test_damaged_folder_is_named(tmp_path, damage):
    folder, _, _ = write_folder(tmp_path)
    spoil, message = FOLDER_DAMAGE[damage]
    spoil(folder)
    with pytest.raises(DataError, match=message) as caught:
        datasets.load("cifar10", tmp_path)
    assert str(folder) in str(caught.value)


def test_folder_of_another_size_is_refused(tmp_path):
    write_folder(tmp_path, "dermamnist", size=28)
    assert datasets.load("dermamnist", tmp_path, source_size=28).images.shape == (23, 28, 28, 3)
    with pytest.raises(DataError, match="the images have 28 px, but source_size is 64"):
        datasets.load("dermamnist", tmp_path, source_size=64)


# ---------------------------------------------------------------- torchvision's files


def write_cifar(root, name, monkeypatch, per_file=6, spoil=None):
    """Pickled batches as published; the lists of checksums are those of the files written here."""
    files = CIFARS[name]
    folder = root / files.base_folder
    folder.mkdir(parents=True)
    classes = datasets.CLASS_NAMES[name]
    parts = [file for file, _ in [*files.train_list, *files.test_list]]
    images = random_images(per_file * len(parts), 32)
    labels = np.arange(len(images)) % len(classes)
    key = "labels" if name == "cifar10" else "fine_labels"
    for i, file in enumerate(parts):
        chosen = slice(i * per_file, (i + 1) * per_file)
        planes = images[chosen].transpose(0, 3, 1, 2).reshape(per_file, -1)
        batch = {"data": planes, key: labels[chosen].tolist()}
        if spoil and i == 0:
            spoil(batch, key)
        (folder / file).write_bytes(pickle.dumps(batch))
    meta = {"label_names" if name == "cifar10" else "fine_label_names": list(classes)}
    (folder / files.meta["filename"]).write_bytes(pickle.dumps(meta))
    for attribute in ("train_list", "test_list"):
        listed = [[file, md5(folder / file)] for file, _ in getattr(files, attribute)]
        monkeypatch.setattr(files, attribute, listed)
    monkeypatch.setattr(files, "meta", files.meta | {"md5": md5(folder / files.meta["filename"])})
    return folder, images, labels


@pytest.mark.parametrize("name", CIFARS)
def test_cifar_parts_are_pooled(tmp_path, monkeypatch, name):
    _, images, labels = write_cifar(tmp_path, name, monkeypatch)
    dataset = datasets.load(name, tmp_path)
    np.testing.assert_array_equal(dataset.images, images)
    np.testing.assert_array_equal(dataset.labels, labels)
    assert dataset.class_names == datasets.CLASS_NAMES[name]
    assert (dataset.source, dataset.verified) == ("torchvision's files", True)


def test_publishers_files_come_before_the_folder(tmp_path, monkeypatch):
    write_folder(tmp_path, "cifar10", size=32)
    assert datasets.load("cifar10", tmp_path).source == "folder format"
    write_cifar(tmp_path, "cifar10", monkeypatch)
    assert datasets.load("cifar10", tmp_path).source == "torchvision's files"


@pytest.mark.parametrize("name", CIFARS)
@pytest.mark.parametrize("which", ["first", "test", "meta"])
@pytest.mark.parametrize("damage", ["missing", "truncated", "flipped"])
def test_damaged_cifar_file_is_named(tmp_path, monkeypatch, name, which, damage):
    folder, _, _ = write_cifar(tmp_path, name, monkeypatch)
    files = CIFARS[name]
    names = {"first": files.train_list[0][0], "test": files.test_list[0][0], "meta": files.meta["filename"]}
    path = folder / names[which]
    if damage == "missing":
        path.unlink()
    elif damage == "truncated":
        cut(path)
    else:
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    problem = "the file is missing" if damage == "missing" else "damaged, its MD5 is not the publisher's"
    with pytest.raises(DataError, match=problem) as caught:
        datasets.load(name, tmp_path)
    assert str(path) in str(caught.value)


def wrong_label(batch, key):
    batch[key][2] = 10


def wrong_size(batch, key):
    batch["data"] = batch["data"][:, :-3]


def wrong_count(batch, key):
    batch[key] = batch[key][:-1]


def no_labels(batch, key):
    del batch[key]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (wrong_label, r"labels\[2\] is outside 0..9: 10"),
        (wrong_size, "cannot be read"),
        (wrong_count, "labels has 35 entries, but images has 36"),
        (no_labels, "cannot be read"),
    ],
)
def test_cifar_content_that_does_not_fit(tmp_path, monkeypatch, spoil, message):
    folder, _, _ = write_cifar(tmp_path, "cifar10", monkeypatch, spoil=spoil)
    with pytest.raises(DataError, match=message) as caught:
        datasets.load("cifar10", tmp_path)
    assert str(folder) in str(caught.value)


def test_cifar_has_one_size(tmp_path):
    with pytest.raises(ValueError, match="unknown source_size of cifar10 64; choose one of: 32"):
        datasets.load("cifar10", tmp_path, source_size=64)


# ---------------------------------------------------------------- medmnist's npz


def write_dermamnist(root, monkeypatch, size=28, checksum=True, **changes):
    """An npz as published, of 9 + 3 + 2 images; changes replaces (or, if None, leaves out) single arrays."""
    suffix = "" if size == 28 else f"_{size}"
    path = root / f"dermamnist{suffix}.npz"
    counts = {"train": 9, "val": 3, "test": 2}
    images, labels = random_images(14, size), (np.arange(14) % 7).astype(np.uint8)
    arrays, start = {}, 0
    for part, count in counts.items():
        arrays[f"{part}_images"] = images[start : start + count]
        arrays[f"{part}_labels"] = labels[start : start + count, None]
        start += count
    arrays |= changes
    np.savez(path, **{key: array for key, array in arrays.items() if array is not None})
    info = medmnist.INFO["dermamnist"]
    monkeypatch.setitem(info, "n_samples", {"train": 9, "val": 3, "test": 2})
    if checksum:
        monkeypatch.setitem(info, f"MD5{suffix}", md5(path))
    return path, images, labels


@pytest.mark.parametrize("size", [28, 64, 128, 224])
def test_dermamnist_parts_are_pooled(tmp_path, monkeypatch, size):
    _, images, labels = write_dermamnist(tmp_path, monkeypatch, size)
    dataset = datasets.load("dermamnist", tmp_path, source_size=None if size == 28 else size)
    np.testing.assert_array_equal(dataset.images, images)
    np.testing.assert_array_equal(dataset.labels, labels)
    assert (dataset.verified, dataset.groups) == (True, None)
    assert dataset.source.endswith(f"dermamnist{'' if size == 28 else f'_{size}'}.npz")


def test_dermamnist_of_another_size_does_not_count(tmp_path, monkeypatch):
    write_dermamnist(tmp_path, monkeypatch, 64)
    with pytest.raises(DataError, match="no data for dermamnist"):
        datasets.load("dermamnist", tmp_path)
    with pytest.raises(ValueError, match="unknown source_size of dermamnist 32"):
        datasets.load("dermamnist", tmp_path, source_size=32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"val_images": None}, "the array val_images is missing"),
        ({"test_labels": None}, "the array test_labels is missing"),
        (
            {"train_images": random_images(8, 28)},
            r"train_images must be uint8 \(9, 28, 28, 3\), got uint8 \(8",
        ),
        ({"train_images": random_images(9, 32)}, "train_images must be uint8"),
        ({"val_images": np.zeros((3, 28, 28, 3))}, "val_images must be uint8 .* got float64"),
        ({"val_labels": np.full((3, 1), 7, np.uint8)}, r"labels\[9\] is outside 0..6: 7"),
    ],
)
def test_dermamnist_content_that_does_not_fit(tmp_path, monkeypatch, changes, message):
    path, _, _ = write_dermamnist(tmp_path, monkeypatch, **changes)
    with pytest.raises(DataError, match=message) as caught:
        datasets.load("dermamnist", tmp_path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("truncated", [False, True])
def test_dermamnist_that_is_not_the_published_file(tmp_path, monkeypatch, truncated):
    path, _, _ = write_dermamnist(tmp_path, monkeypatch, checksum=truncated)
    if truncated:
        cut(path)
    with pytest.raises(DataError, match=r"dermamnist\.npz: damaged, its MD5 is not the publisher's"):
        datasets.load("dermamnist", tmp_path)


# ---------------------------------------------------------------- Kaggle's layout

APTOS_LABELS = [0, 0, 1, 2, 3, 4, 4]


@pytest.fixture
def aptos(tmp_path, monkeypatch):
    folder = tmp_path / "aptos"
    (folder / "train_images").mkdir(parents=True)
    rng = np.random.default_rng(1)
    lines = ["id_code,diagnosis"]
    for i, label in enumerate(APTOS_LABELS):
        shape = (40 + 4 * i, 60, 3)
        Image.fromarray(rng.integers(0, 256, shape, dtype=np.uint8)).save(folder / f"train_images/id{i}.png")
        lines.append(f"id{i},{label}")
    (folder / "train.csv").write_text("\n".join(lines) + "\n")
    monkeypatch.setattr(datasets, "APTOS_CLASS_COUNTS", (2, 1, 1, 1, 2))
    return folder


def test_kaggle_images_are_resized_and_nothing_else(aptos):
    dataset = datasets.load("aptos", aptos.parent, source_size=32)
    assert dataset.images.shape == (7, 32, 32, 3)
    assert dataset.labels.tolist() == APTOS_LABELS
    assert (dataset.source, dataset.verified) == ("Kaggle's images resized to 32 px", False)
    with Image.open(aptos / "train_images/id3.png") as image:
        expected = np.asarray(image.resize((32, 32), Image.Resampling.BILINEAR))
    np.testing.assert_array_equal(dataset.images[3], expected)
    assert datasets.load("aptos", aptos.parent).images.shape == (7, 224, 224, 3)


def test_kaggle_images_are_decoded_once(aptos, monkeypatch):
    first = datasets.load("aptos", aptos.parent, source_size=16)
    with monkeypatch.context() as patch:
        patch.setattr(datasets, "_read_image", lambda path: pytest.fail("decoded again"))
        again = datasets.load("aptos", aptos.parent, source_size=16)
    assert first.digest == again.digest
    assert [path.name for path in aptos.glob("*.npz")] == ["resized_16.npz"]
    assert not list(aptos.glob(".*"))


@pytest.mark.parametrize("damage", ["truncated", "other images", "not an npz"])
def test_damaged_or_outdated_cache_is_not_used(aptos, damage):
    first = datasets.load("aptos", aptos.parent, source_size=16)
    cache = aptos / "resized_16.npz"
    if damage == "truncated":
        cut(cache, 0.9)
    elif damage == "not an npz":
        cache.write_text("nothing")
    else:
        Image.new("RGB", (60, 40)).save(aptos / "train_images/id0.png")
    again = datasets.load("aptos", aptos.parent, source_size=16)
    np.testing.assert_array_equal(again.images[1:], first.images[1:])
    assert (again.images[0].max() == 0) == (damage == "other images")


def test_images_are_loaded_where_no_cache_can_be_written(aptos, monkeypatch):
    def full(*args, **kwargs):
        raise OSError("No space left on device")

    monkeypatch.setattr(np, "savez", full)
    with pytest.warns(UserWarning, match=r"resized_16.npz: the resized images could not be kept: No space"):
        assert len(datasets.load("aptos", aptos.parent, source_size=16).images) == 7
    assert sorted(path.name for path in aptos.iterdir()) == ["train.csv", "train_images"]


def replace_in_table(old, new):
    def spoil(folder):
        table = folder / "train.csv"
        table.write_text(table.read_text().replace(old, new))

    return spoil


KAGGLE_DAMAGE = {
    "table missing": (lambda f: (f / "train.csv").unlink(), "train.csv: the file is missing"),
    "table empty": (lambda f: cut(f / "train.csv", 0), "train.csv: the first line must be id_code,diagnosis"),
    "table binary": (lambda f: (f / "train.csv").write_bytes(b"\xff\xfe\x00"), "train.csv: cannot be read"),
    "table cut between lines": (
        replace_in_table("id6,4\n", ""),
        r"counts by diagnosis are \(2, 1, 1, 1, 1\)",
    ),
    "table cut in a line": (replace_in_table("id6,4\n", "id6"), "train.csv: line 8 must be"),
    "wrong label": (replace_in_table("id4,3", "id4,5"), "train.csv: line 6 must be .* got 'id4,5'"),
    "label of another class": (replace_in_table("id4,3", "id4,2"), "the counts by diagnosis are"),
    "label not a number": (replace_in_table("id0,0", "id0,x"), "train.csv: line 2 must be"),
    "repeated image": (replace_in_table("id1,0", "id0,0"), "the id_code id0 stands there more than once"),
    "image missing": (lambda f: (f / "train_images/id2.png").unlink(), "id2.png: the image is missing"),
    "images missing": (lambda f: shutil.rmtree(f / "train_images"), "id0.png: the image is missing"),
    "image truncated": (lambda f: cut(f / "train_images/id5.png"), "id5.png: the image cannot be decoded"),
    "image empty": (lambda f: cut(f / "train_images/id5.png", 0), "id5.png: the image cannot be decoded"),
}


@pytest.mark.parametrize("damage", KAGGLE_DAMAGE)
def test_damaged_kaggle_file_is_named_and_nothing_is_kept(aptos, damage):
    spoil, message = KAGGLE_DAMAGE[damage]
    spoil(aptos)
    with pytest.raises(DataError, match=message) as caught:
        datasets.load("aptos", aptos.parent, source_size=16)
    assert str(aptos) in str(caught.value)
    assert not list(aptos.glob("*.npz"))


@pytest.mark.parametrize("size", [0, -3, 16.0, "16"])
def test_kaggle_size_must_be_a_number_of_pixels(aptos, size):
    with pytest.raises(ValueError, match="source_size of aptos must be a positive number of pixels"):
        datasets.load("aptos", aptos.parent, source_size=size)


# ---------------------------------------------------------------- digits


def test_digits_are_scikit_learns_with_fixed_noise():
    from sklearn.datasets import load_digits

    dataset = datasets.load("digits")
    assert dataset.images.shape == (1797, 8, 8, 1)
    np.testing.assert_array_equal(dataset.labels, load_digits().target)
    # The unclipped middle of the scale shows the noise as it was added: mean 0, the deviation asked for.
    clean = load_digits().images * (255 / 16)
    middle = np.abs(clean - 127.5) < 1
    noise = (dataset.images[..., 0] - clean)[middle]
    assert abs(noise.mean()) < 4 * datasets.DIGITS_NOISE / np.sqrt(noise.size)
    assert noise.std() == pytest.approx(datasets.DIGITS_NOISE, rel=0.05)
    assert dataset.digest == "a19332c1d0be3b51306e5c750dcd242a66c39cca7df374a874df6c1e8cb882b5"


def test_small_net_reaches_about_80_percent_on_digits():
    dataset = datasets.load("digits")
    images = torch.from_numpy(dataset.images).permute(0, 3, 1, 2)
    labels = torch.from_numpy(dataset.labels)
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(len(labels), generator=generator)
    train, test = order[:1078], order[1078:]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = []
        for channels, width in ((1, 16), (16, 32), (32, 32)):
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
        net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(128, 10))
    optimiser = torch.optim.Adam(net.parameters(), 2e-3)
    for _ in range(12):
        for batch in train[torch.randperm(len(train), generator=generator)].split(32):
            inputs = datasets.normalise(datasets.augment(images[batch], generator), 127, 128)
            loss = nn.functional.cross_entropy(net(inputs), labels[batch])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
    net.eval()
    predicted = net(datasets.normalise(images[test], 127, 128)).argmax(1)
    assert 0.72 < (predicted == labels[test]).float().mean() < 0.88


# ---------------------------------------------------------------- what is missing, where, and the summary


def test_missing_data_says_what_to_put_where(tmp_path):
    expected = {
        "cifar10": ["cifar-10-batches-py", "cifar-10-python.tar.gz", "paperlib data fetch cifar10"],
        "cifar100": ["cifar-100-python", "cifar-100-python.tar.gz", "paperlib data fetch cifar100"],
        "dermamnist": ["dermamnist.npz", "dermamnist_64.npz", "paperlib data fetch dermamnist"],
        "aptos": ["aptos/train.csv", "aptos/train_images/*.png", "paperlib data fetch cannot download"],
    }
    for name, parts in expected.items():
        with pytest.raises(DataError) as caught:
            datasets.load(name, tmp_path)
        for part in [f"no data for {name} in {tmp_path}", f"{tmp_path}/{name}/", "mosaic_00.webp", *parts]:
            assert part in str(caught.value)


def test_unknown_dataset():
    for function in (datasets.load, datasets.check, datasets.fetch):
        with pytest.raises(ValueError, match="unknown dataset 'mnist'; choose one of: digits, cifar10"):
            function("mnist")


def test_root_is_argument_then_environment_then_repository(tmp_path, monkeypatch):
    write_folder(tmp_path / "given")
    write_folder(tmp_path / "environment", count=12)
    monkeypatch.setenv("PAPERLIB_DATA", str(tmp_path / "environment"))
    assert len(datasets.load("cifar10", tmp_path / "given").labels) == 23
    assert len(datasets.load("cifar10").labels) == 12
    monkeypatch.delenv("PAPERLIB_DATA")
    assert datasets.data_root() == Path(datasets.__file__).parents[1] / "data"


def test_check_summarises_and_can_be_written(tmp_path):
    write_folder(tmp_path, "aptos", labels=[0] * 20 + [3] * 3)
    summary = datasets.check("aptos", tmp_path)
    assert summary["class_counts"] == {
        "no_dr": 20,
        "mild": 0,
        "moderate": 0,
        "severe": 3,
        "proliferative": 0,
    }
    assert (summary["count"], summary["size"]) == (23, [8, 8, 3])
    assert (summary["route"], summary["checksum_verified"]) == ("folder format", True)
    assert json.loads(json.dumps(summary)) == summary


def make(images, labels):
    return datasets.Dataset("aptos", images, labels, datasets.CLASS_NAMES["aptos"], "test", False)


def test_digest_tells_images_labels_and_shapes_apart():
    images, labels = random_images(4, 6), np.array([0, 1, 2, 3])
    changed = images.copy()
    changed[-1, -1, -1, -1] ^= 1
    digests = [
        make(images, labels).digest,
        make(changed, labels).digest,
        make(images, labels[::-1].copy()).digest,
        make(images.reshape(4, 9, 4, 3), labels).digest,
    ]
    assert len(set(digests)) == 4
    assert make(images.copy(), labels.astype(np.int32)).digest == digests[0]
    assert make(np.asfortranarray(images), labels).digest == digests[0]


def test_dataset_refuses_what_does_not_fit():
    images, labels = random_images(4, 6), np.array([0, 1, 2, 3])
    with pytest.raises(ValueError, match="images must be uint8"):
        make(images.astype(float), labels)
    with pytest.raises(ValueError, match="images must be uint8"):
        make(images[0], labels)
    with pytest.raises(ValueError, match="labels has 3 entries, but images has 4"):
        make(images, labels[:3])
    with pytest.raises(ValueError, match=r"labels\[1\] is outside 0..4: 5"):
        make(images, np.array([0, 5, 2, 3]))


@pytest.mark.parametrize("channels", [1, 3])
def test_contact_sheet_shows_each_class(tmp_path, channels):
    labels = np.repeat([0, 1, 2, 4], [9, 2, 1, 3])  # class 3 has no image
    shades = np.array([10, 60, 110, 160, 210], dtype=np.uint8)[labels]
    images = np.broadcast_to(shades[:, None, None, None], (15, 6, 6, channels)).copy()
    datasets.contact_sheet(make(images, labels), tmp_path / "new" / "sheet.png", per_class=4)
    with Image.open(tmp_path / "new" / "sheet.png") as sheet:
        pixels = np.asarray(sheet)
    for row, (shade, shown) in enumerate([(10, 4), (60, 2), (110, 1), (160, 0), (210, 3)]):
        line = pixels[row * 50 + 24, 120:, 0]
        assert (line == shade).sum() == shown * 48
        name = pixels[row * 50 : (row + 1) * 50, :120]
        assert (name < 128).any()
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["sheet.png"]


# ---------------------------------------------------------------- fetching, from a server on this machine


@pytest.fixture
def server(tmp_path, monkeypatch):
    """(folder, address) of a web server that gives out the files of the folder."""
    folder = tmp_path / "server"
    folder.mkdir()

    class Handler(SimpleHTTPRequestHandler):
        def __init__(self, *args):
            super().__init__(*args, directory=folder)

        def log_message(self, *args):
            pass

    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as web:
        thread = threading.Thread(target=web.serve_forever)
        thread.start()
        yield folder, f"http://127.0.0.1:{web.server_port}"
        web.shutdown()
        thread.join()


@pytest.fixture
def published_cifar10(server, monkeypatch):
    """CIFAR-10's archive as published, on the server, with its checksums."""
    folder, address = server
    batches, images, _ = write_cifar(folder, "cifar10", monkeypatch)
    archive = folder / CIFAR10.filename
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(batches, CIFAR10.base_folder)
    monkeypatch.setattr(CIFAR10, "url", f"{address}/{archive.name}")
    monkeypatch.setattr(CIFAR10, "tgz_md5", md5(archive))
    return images


def test_fetch_cifar(tmp_path, published_cifar10):
    root = tmp_path / "new" / "data"
    dataset = datasets.fetch("cifar10", root)
    np.testing.assert_array_equal(dataset.images, published_cifar10)
    assert [path.name for path in root.iterdir()] == ["cifar-10-batches-py"]


def test_fetch_keeps_what_is_whole_and_replaces_what_is_damaged(tmp_path, monkeypatch, published_cifar10):
    datasets.fetch("cifar10", tmp_path)
    cut(tmp_path / "cifar-10-batches-py" / "data_batch_2")
    np.testing.assert_array_equal(datasets.fetch("cifar10", tmp_path).images, published_cifar10)
    monkeypatch.setattr(CIFAR10, "url", "http://127.0.0.1:9/absent.tar.gz")
    np.testing.assert_array_equal(datasets.fetch("cifar10", tmp_path).images, published_cifar10)


def test_fetch_takes_the_publishers_files_beside_a_folder(tmp_path, published_cifar10):
    write_folder(tmp_path, "cifar10", size=32)
    assert datasets.fetch("cifar10", tmp_path).source == "torchvision's files"


@pytest.mark.parametrize("size", [28, 64])
def test_fetch_dermamnist(tmp_path, server, monkeypatch, size):
    folder, address = server
    path, images, _ = write_dermamnist(folder, monkeypatch, size)
    key = "url" if size == 28 else f"url_{size}"
    monkeypatch.setitem(medmnist.INFO["dermamnist"], key, f"{address}/{path.name}")
    dataset = datasets.fetch("dermamnist", tmp_path / "data", None if size == 28 else size)
    np.testing.assert_array_equal(dataset.images, images)
    assert [file.name for file in (tmp_path / "data").iterdir()] == [path.name]


@pytest.mark.parametrize("problem", ["no server", "no such file", "wrong checksum"])
@pytest.mark.parametrize("name", ["cifar10", "dermamnist"])
def test_failed_fetch_says_what_to_do_and_leaves_nothing(tmp_path, server, monkeypatch, name, problem):
    folder, address = server
    (folder / "wrong").write_text("an error page")
    address = {
        "no server": "http://127.0.0.1:9/file",
        "no such file": f"{address}/absent",
        "wrong checksum": f"{address}/wrong",
    }[problem]
    monkeypatch.setattr(CIFAR10, "url", address)
    monkeypatch.setitem(medmnist.INFO["dermamnist"], "url", address)
    with pytest.raises(DataError, match=f"{name} could not be fetched") as caught:
        datasets.fetch(name, tmp_path / "data")
    assert "Is there a network?" in str(caught.value)
    assert "folder format" in str(caught.value)
    assert list((tmp_path / "data").iterdir()) == []


def test_aptos_cannot_be_fetched_but_is_verified_where_it_is(aptos, tmp_path):
    with pytest.raises(DataError, match=r"aptos cannot be fetched\n.*\n.*train.csv"):
        datasets.fetch("aptos", tmp_path / "empty")
    assert len(datasets.fetch("aptos", tmp_path, source_size=16).labels) == 7


def test_digits_need_no_fetching(tmp_path):
    assert datasets.fetch("digits", tmp_path).name == "digits"
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------- augmentation


def padded(image, pad_y, pad_x):
    """numpy's reflect padding of (C, H, W) as the oracle."""
    return np.pad(image, ((0, 0), (pad_y, pad_y), (pad_x, pad_x)), mode="reflect")


def find_crop(image, augmented):
    """(top, left, flipped) of every place in the padded image where the augmented one is found."""
    _, height, width = image.shape
    pad_y, pad_x = height // 8, width // 8
    large = padded(image, pad_y, pad_x)
    return [
        (top, left, flip)
        for top in range(2 * pad_y + 1)
        for left in range(2 * pad_x + 1)
        for flip in (False, True)
        if np.array_equal(large[:, top : top + height, left : left + width][:, :, :: -1 if flip else 1], augmented)
    ]


@settings(max_examples=30, deadline=None)
@given(
    batch=st.integers(1, 6),
    channels=st.sampled_from([1, 3]),
    height=st.integers(2, 26),
    width=st.integers(2, 26),
    seed=st.integers(0, 2**31),
)
def test_augmented_image_is_a_crop_of_its_own_padded_image(batch, channels, height, width, seed):
    rng = np.random.default_rng(seed)
    images = rng.integers(0, 256, (batch, channels, height, width), dtype=np.uint8)
    augmented = datasets.augment(torch.from_numpy(images), torch.Generator().manual_seed(seed))
    assert augmented.dtype == torch.uint8
    assert augmented.shape == images.shape
    for image, result in zip(images, augmented.numpy(), strict=True):
        assert find_crop(image, result)


def test_crops_and_flips_are_uniform_and_independent():
    image = random_images(1, 16)[0].transpose(2, 0, 1)
    images = torch.from_numpy(np.repeat(image[None], 4000, axis=0))
    augmented = datasets.augment(images, torch.Generator().manual_seed(0)).numpy()
    places = {}
    for result in augmented:
        key = result.tobytes()
        places[key] = places.get(key, 0) + 1
    # 5 x 5 windows, flipped or not: 50 outcomes of 80 expected each.
    assert len(places) == 50
    counts = np.array(list(places.values()))
    assert ((counts - 80) ** 2 / 80).sum() < 85.4  # chi-squared with 49 degrees of freedom, p = 0.001
    found = [find_crop(image, np.frombuffer(key, np.uint8).reshape(image.shape)) for key in places]
    assert {one for many in found for one in many} == {
        (top, left, flip) for top in range(5) for left in range(5) for flip in (False, True)
    }


def test_generator_alone_determines_the_augmentation():
    images = torch.from_numpy(random_images(32, 32).transpose(0, 3, 1, 2).copy())
    first = datasets.augment(images, torch.Generator().manual_seed(7))
    torch.manual_seed(99)
    before = torch.get_rng_state()
    kept = images.clone()
    assert torch.equal(first, datasets.augment(images, torch.Generator().manual_seed(7)))
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(images, kept)
    assert not torch.equal(first, datasets.augment(images, torch.Generator().manual_seed(8)))
    generator = torch.Generator().manual_seed(7)
    datasets.augment(images, generator)
    assert not torch.equal(first, datasets.augment(images, generator))
    strided = images.to(memory_format=torch.channels_last)
    assert torch.equal(first, datasets.augment(strided, torch.Generator().manual_seed(7)))


def test_views_are_the_named_crops():
    images = random_images(5, 24).transpose(0, 3, 1, 2).copy()
    large = np.stack([padded(image, 3, 3) for image in images])
    crops = {
        "plain": images,
        "crop_nw": large[:, :, :24, :24],
        "crop_ne": large[:, :, :24, 6:],
        "crop_sw": large[:, :, 6:, :24],
        "crop_se": large[:, :, 6:, 6:],
    }
    expected = crops | {"flip" if name == "plain" else f"{name}_flip": crop[..., ::-1] for name, crop in crops.items()}
    assert set(datasets.VIEWS) == set(expected)
    assert len(datasets.VIEWS) == 10
    for name in datasets.VIEWS:
        np.testing.assert_array_equal(datasets.views(torch.from_numpy(images), name).numpy(), expected[name])
    with pytest.raises(ValueError, match="unknown view 'crop'; choose one of: plain, flip, crop_nw"):
        datasets.views(torch.from_numpy(images), "crop")


def test_views_of_images_that_are_not_square():
    images = random_images(2, 24).transpose(0, 3, 1, 2)[:, :, :16].copy()
    large = np.stack([padded(image, 2, 3) for image in images])
    view = datasets.views(torch.from_numpy(images), "crop_se_flip")
    np.testing.assert_array_equal(view.numpy(), large[:, :, 4:, 6:][..., ::-1])


def test_normalise_in_pixel_values():
    images = torch.from_numpy(random_images(4, 8).transpose(0, 3, 1, 2).copy())
    mean, std = [123.7, 116.3, 103.5], [58.4, 57.1, 57.4]
    result = datasets.normalise(images, mean, std)
    assert result.dtype == torch.float32
    shape = (1, 3, 1, 1)
    expected = (images.numpy().astype(np.float64) - np.reshape(mean, shape)) / np.reshape(std, shape)
    np.testing.assert_allclose(result.numpy(), expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(datasets.normalise(images, 127, 128), (images.float() - 127) / 128)
    floats = images.float()
    datasets.normalise(floats, 127, 128)
    assert torch.equal(floats, images.float())
    with pytest.raises(ValueError, match="mean has 3 values for images of 1 channels"):
        datasets.normalise(images[:, :1], mean, std)
    with pytest.raises(ValueError, match="std must be positive"):
        datasets.normalise(images, 0, 0)


@pytest.mark.parametrize(("side", "source"), [(112, 32), (16, 48), (32, 32)])
def test_resize_agrees_with_pillow(side, source):
    images = random_images(3, source)
    result = datasets.resize(torch.from_numpy(images).permute(0, 3, 1, 2), side)
    assert result.dtype == torch.uint8
    assert result.shape == (3, 3, side, side)
    for image, resized in zip(images, result.permute(0, 2, 3, 1).numpy(), strict=True):
        expected = np.asarray(Image.fromarray(image).resize((side, side), Image.Resampling.BILINEAR))
        # Both round to whole pixel values after each of the two directions.
        assert np.abs(resized.astype(int) - expected).max() <= 2


def test_batches_must_have_four_axes():
    image = torch.zeros(3, 8, 8, dtype=torch.uint8)
    for call in (
        lambda: datasets.augment(image, torch.Generator()),
        lambda: datasets.views(image, "plain"),
        lambda: datasets.resize(image, 8),
        lambda: datasets.normalise(image, 127, 128),
    ):
        with pytest.raises(ValueError, match=r"images must be \(images, channels, height, width\), got"):
            call()


# ---------------------------------------------------------------- the real data, where there is some


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("cifar10", None),
        ("cifar100", None),
        ("dermamnist", [327, 514, 1099, 115, 1113, 6705, 142]),
        ("aptos", list(datasets.APTOS_CLASS_COUNTS)),
    ],
)
def test_real_data(name, counts):
    root = os.environ.get("PAPERLIB_TEST_DATA")
    if not root:
        pytest.skip("PAPERLIB_TEST_DATA names no folder with the real datasets")
    summary = datasets.check(name, root)
    found = list(summary["class_counts"].values())
    # The CIFARs are balanced, in full and in a subset; the others are all there is.
    assert len(set(found)) == 1 if counts is None else found == counts
    assert summary["checksum_verified"] or name == "aptos"
