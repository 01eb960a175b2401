"""What a network is fed: images augmented on the device, or features of a frozen trunk computed once (D22)."""

import hashlib
import sys
from pathlib import Path

import numpy as np
import torch
from tqdm.auto import tqdm

from paperlib import datasets, networks, paths, records

CHUNK = 16  # images through the trunk at once: small enough for the cache; fixed, so that the bits are too


class ImageInputs:
    """Images as uint8 on the device; resized, augmented (training) and normalised a batch at a time."""

    def __init__(self, images, network, image_size, augment, device="cpu"):
        self.images = torch.from_numpy(np.ascontiguousarray(images.transpose(0, 3, 1, 2))).to(device)
        self.spec, self.image_size, self.augment = networks.SPECS[network], image_size, augment

    def __len__(self):
        return len(self.images)

    def training_batch(self, index, generator):
        """A batch as the network sees it in training; crops and flips come from the generator."""
        images = self._resized(index)
        if self.augment:
            images = datasets.augment(images, generator)
        return self._normalised(images)

    def plain_batch(self, index):
        """A batch as the network sees it in evaluation."""
        return self._normalised(self._resized(index))

    def view_batch(self, index, view):
        """A batch in a fixed view."""
        return self._normalised(datasets.views(self._resized(index), view))

    def _resized(self, index):
        images = self.images[index]
        return images if images.shape[-1] == self.image_size else datasets.resize(images, self.image_size)

    def _normalised(self, images):
        images = datasets.normalise(images, self.spec.mean, self.spec.std)
        return images.contiguous(memory_format=torch.channels_last)


class FeatureInputs:
    """Features of a frozen trunk, (inputs, height, width, channels) float16, one memory-mapped array a view."""

    def __init__(self, views, device="cpu"):
        self.views = [_mapped(path).to(device) for path in views]

    def __len__(self):
        return len(self.views[0])

    def training_batch(self, index, generator):
        """A batch in which each input shows one of its views, drawn by the generator."""
        drawn = torch.randint(len(self.views), (len(index),), generator=generator, device=generator.device)
        drawn = drawn.to(index.device)
        batch = self.views[0][index]
        for number, view in enumerate(self.views[1:], start=1):
            chosen = drawn == number
            batch[chosen] = view[index[chosen]]
        return batch.permute(0, 3, 1, 2).float()

    def plain_batch(self, index):
        """A batch of the plain view."""
        return self.views[0][index].permute(0, 3, 1, 2).float()


def _mapped(path):
    try:
        # Copy-on-write, because torch has no read-only tensors; nothing writes to them.
        return torch.from_numpy(np.load(path, mmap_mode="c"))
    except (ValueError, EOFError) as error:
        raise records.RecordError(f"{path} is damaged ({error}); delete it and run again") from error


def cached_features(dataset, index, network, image_size, view, show_progress=True):
    """File of the frozen trunk's features of dataset.images[index] in one view; computed if it is not there."""
    trunk, weights = networks.frozen_trunk(network)
    trunk = trunk.to(memory_format=torch.channels_last)
    key = hashlib.sha256(f"{dataset.digest} {weights} {image_size} {view} {CHUNK}".encode())
    key.update(np.ascontiguousarray(index, dtype="<i8"))
    path = Path(paths.cache()) / "features" / f"{dataset.name}-{view}-{key.hexdigest()[:16]}.npy"
    if path.exists():
        return path
    records.check_writable(path.parent)
    images = ImageInputs(dataset.images[index], network, image_size, augment=False)
    computed = []
    with torch.inference_mode():
        chunks = torch.arange(len(images)).split(CHUNK)
        # A terminal is drawn anew twice a second, a log gets a line a minute.
        every = {"mininterval": 0.5 if sys.stderr.isatty() else 60, "disable": not show_progress, "unit": "chunk"}
        for chunk in tqdm(chunks, f"features of {dataset.name} ({view})", **every):
            features = trunk(images.view_batch(chunk, view))
            computed.append(features.permute(0, 2, 3, 1).to(torch.float16).numpy())
    with records.replacing(path) as temporary:
        np.save(temporary, np.concatenate(computed))
    return path
