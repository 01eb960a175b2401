"""The datasets: find, verify and load them as uint8 arrays; augmentation and fixed views in batches."""

import csv
import hashlib
import json
import math
import os
import tempfile
import warnings
import zipfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
import torchvision
from PIL import Image, ImageDraw
from torchvision.datasets.utils import check_integrity
from torchvision.transforms.v2.functional import resize as resize_images

from paperlib import checks, paths
from paperlib.errors import UserError

CIFAR10_NAMES = "airplane automobile bird cat deer dog frog horse ship truck"
CIFAR100_NAMES = """
apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can
castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin
elephant flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard
lobster man maple_tree motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear
pickup_truck pine_tree plain plate poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark
shrew skunk skyscraper snail snake spider squirrel streetcar sunflower sweet_pepper table tank telephone
television tiger tractor train trout tulip turtle wardrobe whale willow_tree wolf woman worm
"""
CLASS_NAMES = {
    "digits": tuple("0123456789"),
    "cifar10": tuple(CIFAR10_NAMES.split()),
    "cifar100": tuple(CIFAR100_NAMES.split()),
    "dermamnist": ("akiec", "bcc", "bkl", "df", "mel", "nv", "vasc"),
    "aptos": ("no_dr", "mild", "moderate", "severe", "proliferative"),
}
NAMES = tuple(CLASS_NAMES)


@dataclass(frozen=True)
class Published:
    """How many images the publisher's files hold, and their side in pixels (of the smallest version, or as resized)."""

    images: int
    side: int


PUBLISHED = {
    "digits": Published(1797, 8),
    "cifar10": Published(60_000, 32),
    "cifar100": Published(60_000, 32),
    "dermamnist": Published(10_015, 28),
    "aptos": Published(3662, 224),
}

# Chosen so that a small convolutional net with the protocol's crops and flips reaches about 80 % accuracy.
DIGITS_NOISE = 60.0
DIGITS_SEED = 0

# Kaggle publishes no checksum of its files; the counts by class find a cut or edited train.csv.
APTOS_CLASS_COUNTS = (1805, 370, 999, 193, 295)
APTOS_SIDE = 224
DERMAMNIST_SIDES = (28, 64, 128, 224)

CORNERS = ("nw", "ne", "sw", "se")
VIEWS = ("plain", "flip", *(f"crop_{corner}{flip}" for corner in CORNERS for flip in ("", "_flip")))


class DataError(UserError):
    """Data that is missing, damaged or cannot be fetched; the message says which file and what to do."""


@dataclass(frozen=True, eq=False, repr=False)
class Dataset:
    """All images of a dataset, its published parts pooled."""

    name: str
    images: np.ndarray  # (N, H, W, C) uint8
    labels: np.ndarray  # (N,) int64
    class_names: tuple[str, ...]
    source: str  # which route the images came by
    verified: bool  # whether a checksum was given and agreed
    groups: np.ndarray | None = None  # (N,) lesion identifiers: images of one group show the same lesion

    def __post_init__(self):
        if self.images.ndim != 4 or self.images.dtype != np.uint8 or self.images.size == 0:
            raise ValueError(
                f"images must be uint8 (images, height, width, channels) and not empty, "
                f"got {self.images.dtype} {self.images.shape}"
            )
        count = len(self.images)
        checks.same_length(count, len(self.labels), "images", "labels")
        labels = checks.class_indices(self.labels, count, len(self.class_names))
        object.__setattr__(self, "labels", labels.astype(np.int64))
        if self.groups is not None:
            checks.same_length(count, len(self.groups), "images", "groups")

    def __repr__(self):
        size = " x ".join(map(str, self.images.shape[1:]))
        checksum = "checksum verified" if self.verified else "no checksum"
        return f"<{self.name}: {len(self.labels)} images of {size}; {self.source}, {checksum}>"

    @cached_property
    def digest(self):
        """SHA-256 of the shape, the images and the labels: equal exactly when the data is."""
        digest = hashlib.sha256(str(self.images.shape).encode())
        digest.update(np.ascontiguousarray(self.images))
        digest.update(self.labels.astype("<i8"))
        return digest.hexdigest()


# ---------------------------------------------------------------- finding and loading


def data_root(root=None):
    """The folder that holds the data: the argument, else PAPERLIB_DATA, else data/ in the repository."""
    return Path(root or os.environ.get("PAPERLIB_DATA") or paths.root() / "data")


def load(name, root=None, source_size=None):
    """Load a dataset by the first of its routes whose files are there; see docs/data.md for the order.

    source_size is the side of the stored images in pixels; None takes the dataset's usual one (D09).
    """
    checks.choice("dataset", name, NAMES)
    root = data_root(root)
    for route in ROUTES[name]:
        dataset = route(name, root, source_size)
        if dataset is not None:
            return dataset
    raise DataError(f"no data for {name} in {root}\n{instructions(name, root)}")


def check(name, root=None, source_size=None):
    """Load and verify a dataset and return what is there as a dictionary that can be written as JSON."""
    dataset = load(name, root, source_size)
    counts = np.bincount(dataset.labels, minlength=len(dataset.class_names))
    return {
        "name": name,
        "route": dataset.source,
        "count": len(dataset.labels),
        "size": list(dataset.images.shape[1:]),
        "class_counts": dict(zip(dataset.class_names, counts.tolist(), strict=True)),
        "groups": None if dataset.groups is None else len(np.unique(dataset.groups)),
        "checksum_verified": dataset.verified,
        "digest": dataset.digest,
    }


def instructions(name, root):
    """What to put where so that load(name, root) works: every accepted layout."""
    folder = (
        f"{root}/{name}/ in the folder format: meta.json, labels.txt, mosaic_00.webp, mosaic_01.webp, ... "
        "(docs/data.md)"
    )
    fetch_command = f"python -m paperlib data fetch {name}"
    if name in ("cifar10", "cifar100"):
        files = _cifar_class(name)
        layouts = [
            f"{root}/{files.base_folder}/ as unpacked from {files.url}, or run: {fetch_command}",
            folder,
        ]
    elif name == "dermamnist":
        layouts = [
            f"{root}/dermamnist.npz (28 px; dermamnist_64.npz, _128.npz or _224.npz for another "
            f"source_size) from MedMNIST v2, or run: {fetch_command}",
            folder,
        ]
    elif name == "aptos":
        layouts = [
            f"{root}/aptos/train.csv and {root}/aptos/train_images/*.png from Kaggle's competition "
            "aptos2019-blindness-detection; its licence wants your own account, so "
            "python -m paperlib data fetch cannot download it",
            folder,
        ]
    else:
        return "digits comes with scikit-learn: there is nothing to put anywhere"
    lines = "\n  or ".join(layouts)
    return f"Put one of these there:\n     {lines}\nAnother place: PAPERLIB_DATA, or data_folder in the configuration."


def _dataset(path, name, images, labels, **fields):
    """A Dataset whose errors name the file or folder it came from."""
    try:
        return Dataset(name, images, np.asarray(labels), CLASS_NAMES[name], **fields)
    except ValueError as error:
        raise DataError(f"{path}: {error}") from error


def _only_size(name, source_size, allowed):
    if source_size is not None:
        checks.choice(f"source_size of {name}", source_size, allowed)


# ---------------------------------------------------------------- route: scikit-learn's digits


def _digits(name, root, source_size):
    from sklearn.datasets import load_digits

    _only_size(name, source_size, (8,))
    digits = load_digits()
    # The sum of a draw's eight bytes is nearly normal and, unlike a float transform, the same everywhere.
    raw = np.random.PCG64(DIGITS_SEED).random_raw(digits.images.size)
    sums = raw.view(np.uint8).reshape(*digits.images.shape, 8).sum(axis=-1, dtype=np.int64)
    deviation = math.sqrt(8 * (256**2 - 1) / 12)
    noisy = digits.images * (255 / 16) + (sums - 8 * 127.5) * (DIGITS_NOISE / deviation)
    images = np.rint(noisy).clip(0, 255).astype(np.uint8)[..., None]
    source = f"scikit-learn's digits with pixel noise of deviation {DIGITS_NOISE:g}"
    return _dataset("load_digits()", name, images, digits.target, source=source, verified=False)


# ---------------------------------------------------------------- route: torchvision's CIFAR files


def _cifar_class(name):
    return {"cifar10": torchvision.datasets.CIFAR10, "cifar100": torchvision.datasets.CIFAR100}[name]


def _cifar(name, root, source_size):
    _only_size(name, source_size, (32,))
    files = _cifar_class(name)
    folder = root / files.base_folder
    if not folder.is_dir():
        return None
    try:
        parts = [files(root, train=train) for train in (True, False)]
    except (RuntimeError, ValueError, KeyError) as error:
        raise DataError(_cifar_damage(files, folder) or f"{folder}: cannot be read: {error}") from error
    if tuple(parts[0].classes) != CLASS_NAMES[name]:
        raise DataError(f"{folder / files.meta['filename']}: the class names are not those of {name}")
    images = np.concatenate([part.data for part in parts])
    labels = np.concatenate([part.targets for part in parts])
    return _dataset(folder, name, images, labels, source="torchvision's files", verified=True)


def _cifar_damage(files, folder):
    for file, md5 in [*files.train_list, *files.test_list, (files.meta["filename"], files.meta["md5"])]:
        if not (folder / file).is_file():
            return f"{folder / file}: the file is missing; fetch it again"
        if not check_integrity(folder / file, md5):
            return f"{folder / file}: damaged, its MD5 is not the publisher's {md5}; fetch it again"
    return None


# ---------------------------------------------------------------- route: MedMNIST's npz


def _dermamnist_file(source_size):
    side = source_size or DERMAMNIST_SIDES[0]
    suffix = "" if side == DERMAMNIST_SIDES[0] else f"_{side}"
    return side, suffix, f"dermamnist{suffix}.npz"


def _medmnist(name, root, source_size):
    _only_size(name, source_size, DERMAMNIST_SIDES)
    side, suffix, file = _dermamnist_file(source_size)
    path = root / file
    if not path.is_file():
        return None
    # Imported late: it takes seconds, and only this route needs it.
    from medmnist import INFO

    md5, parts = INFO[name][f"MD5{suffix}"], INFO[name]["n_samples"]
    if not check_integrity(path, md5):
        raise DataError(f"{path}: damaged, its MD5 is not the publisher's {md5}; fetch it again")
    images = np.empty((sum(parts.values()), side, side, 3), dtype=np.uint8)
    labels = np.empty(len(images), dtype=np.int64)
    start = 0
    with np.load(path) as arrays:
        for part, count in parts.items():
            stop = start + count
            images[start:stop] = _npz_array(path, arrays, f"{part}_images", (count, side, side, 3))
            labels[start:stop] = _npz_array(path, arrays, f"{part}_labels", (count, 1))[:, 0]
            start = stop
    return _dataset(path, name, images, labels, source=f"medmnist's {file}", verified=True)


def _npz_array(path, arrays, key, shape):
    if key not in arrays:
        raise DataError(f"{path}: the array {key} is missing")
    array = arrays[key]
    if array.shape != shape or array.dtype != np.uint8:
        raise DataError(f"{path}: {key} must be uint8 {shape}, got {array.dtype} {array.shape}")
    return array


# ---------------------------------------------------------------- route: Kaggle's APTOS layout


def _kaggle(name, root, source_size):
    folder = root / name
    table = folder / "train.csv"
    if not (table.exists() or (folder / "train_images").exists()):
        return None
    side = APTOS_SIDE if source_size is None else source_size
    if not (isinstance(side, int) and side > 0):
        raise ValueError(f"source_size of {name} must be a positive number of pixels, got {side!r}")
    identifiers, labels = _read_aptos_table(table)
    files = [folder / "train_images" / f"{identifier}.png" for identifier in identifiers]
    for file in files:
        if not file.is_file():
            raise DataError(f"{file}: the image is missing, but {table} names it")
    images = _resized_images(files, side, folder / f"resized_{side}.npz")
    return _dataset(folder, name, images, labels, source=f"Kaggle's images resized to {side} px", verified=False)


def _read_aptos_table(table):
    if not table.is_file():
        raise DataError(f"{table}: the file is missing, but the folder train_images is there")
    try:
        with table.open(newline="", encoding="utf-8-sig") as lines:
            rows = list(csv.reader(lines))
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{table}: cannot be read: {error}") from error
    if not rows or rows[0] != ["id_code", "diagnosis"]:
        raise DataError(f"{table}: the first line must be id_code,diagnosis")
    grades = [str(grade) for grade in range(len(CLASS_NAMES["aptos"]))]
    for number, row in enumerate(rows[1:], start=2):
        if len(row) != 2 or not row[0] or row[1] not in grades:
            raise DataError(f"{table}: line {number} must be an id_code and a diagnosis 0..4, got {','.join(row)!r}")
    identifiers = [row[0] for row in rows[1:]]
    labels = np.array([int(row[1]) for row in rows[1:]], dtype=np.int64)
    repeated = [identifier for identifier, times in Counter(identifiers).items() if times > 1]
    if repeated:
        raise DataError(f"{table}: the id_code {repeated[0]} stands there more than once")
    counts = tuple(np.bincount(labels, minlength=len(grades)).tolist())
    if counts != APTOS_CLASS_COUNTS:
        raise DataError(f"{table}: the counts by diagnosis are {counts}, published are {APTOS_CLASS_COUNTS}")
    return identifiers, labels


def _resized_images(files, side, cache):
    """The images as (N, side, side, 3), from the cache if it was made from these files, else decoded."""
    listing = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    fingerprint = hashlib.sha256(json.dumps(listing).encode()).hexdigest()
    try:
        with np.load(cache) as arrays:
            if str(arrays["fingerprint"]) == fingerprint:
                return arrays["images"]
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        pass  # no cache or a damaged one: it is made anew below

    def decode(file):
        return np.asarray(_read_image(file).resize((side, side), Image.Resampling.BILINEAR))

    with ThreadPoolExecutor() as pool:
        images = np.stack(list(pool.map(decode, files)))
    try:
        with _replacing(cache) as temporary, temporary.open("wb") as stream:
            np.savez(stream, images=images, fingerprint=fingerprint)
    except OSError as error:
        warnings.warn(f"{cache}: the resized images could not be kept: {error}", stacklevel=2)
    return images


# ---------------------------------------------------------------- route: the folder format


def _folder(name, root, source_size):
    folder = root / name
    mosaics = sorted(folder.glob("mosaic_*.webp"))
    if not (mosaics or (folder / "meta.json").exists() or (folder / "labels.txt").exists()):
        return None
    meta = _read_meta(folder / "meta.json", name)
    size, count = meta["size"], meta["count"]
    if source_size not in (None, size):
        raise DataError(
            f"{folder / 'meta.json'}: the images have {size} px, but source_size is {source_size}\n"
            f"{instructions(name, root)}"
        )
    labels = _read_labels(folder / "labels.txt", count, len(CLASS_NAMES[name]))
    expected = [folder / f"mosaic_{i:02d}.webp" for i in range(math.ceil(count / meta["per_mosaic"]))]
    for path in expected:
        if path not in mosaics:
            raise DataError(f"{path}: the file is missing; meta.json promises {count} images")
    for path in mosaics:
        if path not in expected:
            raise DataError(f"{path}: one mosaic too many; meta.json promises {count} images")
    images = np.empty((count, size, size, 3), dtype=np.uint8)
    for i, path in enumerate(expected):
        part = images[i * meta["per_mosaic"] : (i + 1) * meta["per_mosaic"]]
        part[:] = _read_mosaic(path, size, meta["columns"], len(part))
    checksum = meta.get("sha256_images")
    if checksum is not None and hashlib.sha256(images).hexdigest() != checksum:
        raise DataError(f"{folder}: the SHA-256 of the decoded images is not meta.json's {checksum}")
    groups = meta.get("lesion_ids")
    return _dataset(
        folder,
        name,
        images,
        labels,
        source="folder format",
        verified=checksum is not None,
        groups=None if groups is None else np.array(groups),
    )


def _read_meta(path, name):
    if not path.is_file():
        raise DataError(f"{path}: the file is missing")
    try:
        meta = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(meta, dict):
        raise DataError(f"{path}: must hold a JSON object")
    for key in ("size", "count", "per_mosaic", "columns"):
        if type(meta.get(key)) is not int or meta[key] <= 0:
            raise DataError(f"{path}: {key} must be a positive integer, got {meta.get(key)!r}")
    if meta.get("name", name) != name:
        raise DataError(f"{path}: the dataset is {meta['name']!r}, expected {name!r}")
    if meta.get("classes") != list(CLASS_NAMES[name]):
        raise DataError(f"{path}: classes must be those of {name}: {', '.join(CLASS_NAMES[name])}")
    if not isinstance(meta.get("lesion_ids", []), list):
        raise DataError(f"{path}: lesion_ids must be a list, one an image")
    return meta


def _read_labels(path, count, classes):
    if not path.is_file():
        raise DataError(f"{path}: the file is missing")
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    valid = {str(label): label for label in range(classes)}
    for number, line in enumerate(lines, start=1):
        if line.strip() not in valid:
            raise DataError(f"{path}: line {number} must be a class index 0..{classes - 1}, got {line!r}")
    if len(lines) != count:
        raise DataError(f"{path}: {len(lines)} labels, but meta.json promises {count} images")
    return np.array([valid[line.strip()] for line in lines], dtype=np.int64)


def _read_mosaic(path, size, columns, count):
    """The first count tiles of a mosaic, row by row, as (count, size, size, 3)."""
    pixels = np.asarray(_read_image(path))
    height, width, _ = pixels.shape
    rows = math.ceil(count / columns)
    if width != columns * size or height % size or height < rows * size:
        raise DataError(
            f"{path}: {width} x {height} pixels cannot hold {count} images of {size} px, {columns} to a row"
        )
    tiles = pixels.reshape(height // size, size, columns, size, 3).swapaxes(1, 2)
    return tiles.reshape(-1, size, size, 3)[:count]


# ---------------------------------------------------------------- files


def _read_image(path):
    """The decoded RGB image; a file that cannot be decoded to its end is a DataError that names it."""
    try:
        with Image.open(path) as image:
            return image.convert("RGB")
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise DataError(f"{path}: the image cannot be decoded, it is damaged or cut: {error}") from error


@contextmanager
def _replacing(path) -> Iterator[Path]:
    """A temporary path that takes the place of path when the block ends well, and is removed when not."""
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as folder:
        temporary = Path(folder) / path.name
        yield temporary
        os.replace(temporary, path)


# ---------------------------------------------------------------- fetching

# The publisher's own files come first: they are complete, and a folder may hold a part of the images.
ROUTES = {
    "digits": (_digits,),
    "cifar10": (_cifar, _folder),
    "cifar100": (_cifar, _folder),
    "dermamnist": (_medmnist, _folder),
    "aptos": (_kaggle, _folder),
}


def fetch(name, root=None, source_size=None):
    """Download a dataset from its publisher, verify it by checksum, and return the loaded Dataset.

    Files that are there and verify are kept; damaged ones are replaced. APTOS cannot be fetched.
    """
    checks.choice("dataset", name, NAMES)
    root = data_root(root)
    publisher = ROUTES[name][0]
    if name == "aptos":
        dataset = publisher(name, root, source_size)
        if dataset is None:
            raise DataError(f"aptos cannot be fetched\n{instructions(name, root)}")
        return dataset
    try:
        dataset = publisher(name, root, source_size)
    except DataError:
        dataset = None
    if dataset is None:
        _download(name, root, source_size)
        dataset = publisher(name, root, source_size)
    return dataset


def _download(name, root, source_size):
    """Download into a temporary folder beside the target, verify there, then move each file into place."""
    root.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory(dir=root, prefix=".fetch.") as temporary:
            if name == "dermamnist":
                from medmnist import DermaMNIST

                side, _, file = _dermamnist_file(source_size)
                DermaMNIST(split="train", root=temporary, size=side, download=True)
                fetched = [file]
            else:
                files = _cifar_class(name)
                files(temporary, download=True)
                listed = [*files.train_list, *files.test_list, (files.meta["filename"], None)]
                fetched = [f"{files.base_folder}/{file}" for file, _ in listed]
            for file in fetched:
                (root / file).parent.mkdir(exist_ok=True)
                os.replace(Path(temporary) / file, root / file)
    except (OSError, RuntimeError) as error:
        reason = error.__context__ or error
        raise DataError(
            f"{name} could not be fetched: {type(reason).__name__}: {reason}\n"
            f"Is there a network? If not:\n{instructions(name, root)}"
        ) from error


# ---------------------------------------------------------------- contact sheet


def contact_sheet(dataset, path, per_class=8, classes_per_column=25, tile=48):
    """Write a PNG with the first images of each class beside the class's name."""
    margin, name_width = 2, 120
    column_width = name_width + per_class * (tile + margin)
    columns = math.ceil(len(dataset.class_names) / classes_per_column)
    rows = min(len(dataset.class_names), classes_per_column)
    sheet = Image.new("RGB", (columns * column_width, rows * (tile + margin)), "white")
    draw = ImageDraw.Draw(sheet)
    for index, class_name in enumerate(dataset.class_names):
        left = index // classes_per_column * column_width
        top = index % classes_per_column * (tile + margin)
        draw.text((left + 4, top + tile // 2), class_name, fill="black", anchor="lm")
        for place, chosen in enumerate(np.flatnonzero(dataset.labels == index)[:per_class]):
            pixels = dataset.images[chosen]
            image = Image.fromarray(np.broadcast_to(pixels, (*pixels.shape[:2], 3)).copy())
            sheet.paste(image.resize((tile, tile)), (left + name_width + place * (tile + margin), top))
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with _replacing(path) as temporary:
        sheet.save(temporary, format="PNG")


# ---------------------------------------------------------------- images in batches on the device


def augment(images, generator):
    """Each image padded by 1/8 of its side (reflect), cropped at random and flipped with p = 0.5 (D10).

    images is (B, C, H, W) of any device and type; the generator alone determines crops and flips.
    """
    _check_batch(images)
    batch, _, height, width = images.shape
    drawn = [
        torch.randint(high, (batch,), generator=generator, device=generator.device).to(images.device)
        for high in (2 * (height // 8) + 1, 2 * (width // 8) + 1, 2)
    ]
    return _crop(images, drawn[0], drawn[1], drawn[2].bool())


def views(images, which):
    """The fixed view of images named by which (one of VIEWS), for cached features (D22).

    "plain" is the images themselves; crop_nw, _ne, _sw and _se are the four corner crops of the image padded
    as in augment; "flip" and the names that end in "_flip" are the same, flipped horizontally.
    """
    _check_batch(images)
    checks.choice("view", which, VIEWS)
    batch, _, height, width = images.shape
    pad_y, pad_x = height // 8, width // 8
    corners = {"n": 0, "s": 2 * pad_y, "w": 0, "e": 2 * pad_x}
    top, left = (corners[which[5]], corners[which[6]]) if which.startswith("crop") else (pad_y, pad_x)
    offsets = torch.tensor([top, left], device=images.device).expand(batch, 2)
    flipped = torch.full((batch,), which.endswith("flip"), device=images.device)
    return _crop(images, offsets[:, 0], offsets[:, 1], flipped)


def resize(images, side):
    """Images (B, C, H, W) uint8 resized to side x side: bilinear, with antialiasing when they get smaller."""
    _check_batch(images)
    return resize_images(images, [side, side], antialias=True)


def normalise(images, mean, std):
    """(images - mean) / std in float32; mean and std in pixel values 0..255, one number or one a channel."""
    _check_batch(images)
    scales = [torch.as_tensor(value, dtype=torch.float32, device=images.device).reshape(-1) for value in (mean, std)]
    for scale, name in zip(scales, ("mean", "std"), strict=True):
        if len(scale) not in (1, images.shape[1]):
            raise ValueError(f"{name} has {len(scale)} values for images of {images.shape[1]} channels")
    if not (scales[1] > 0).all():
        raise ValueError(f"std must be positive, got {std}")
    floats = images.to(torch.float32, copy=True)
    return floats.sub_(scales[0].view(-1, 1, 1)).div_(scales[1].view(-1, 1, 1))


def _check_batch(images):
    if images.ndim != 4 or images.numel() == 0:
        raise ValueError(f"images must be (images, channels, height, width), got shape {tuple(images.shape)}")


def _crop(images, top, left, flipped):
    """The window at (top, left) of each reflect-padded image, flipped where asked, without padding at all.

    Rows are copied whole first; only the columns need a gather by pixel.
    """
    batch, channels, height, width = images.shape
    device = images.device
    rows = _reflect(torch.arange(height, device=device) + (top - height // 8)[:, None], height)
    columns = torch.arange(width, device=device).expand(batch, width)
    columns = torch.where(flipped[:, None], width - 1 - columns, columns)
    columns = _reflect(columns + (left - width // 8)[:, None], width)
    planes = torch.arange(batch * channels, device=device).view(batch, channels, 1)
    picked = images.reshape(-1, width).index_select(0, (planes * height + rows[:, None]).flatten())
    picked = picked.view(batch, channels * height, width)
    return picked.gather(2, columns[:, None].expand_as(picked)).view(images.shape)


def _reflect(index, side):
    return (side - 1) - ((side - 1) - index.abs()).abs()
