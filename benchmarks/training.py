"""How much of training is the network's own arithmetic, against what a user would write instead.

Three ratios, each from one run with its two sides interleaved: an epoch against the same steps on a batch that is in
place; an epoch against DataLoader + PIL transforms; two processes against one. Writes docs/benchmarks/training.md.
Run: python benchmarks/training.py [--quick], on a machine that does nothing else.
"""

import os

os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"  # before torch is imported

import argparse
import multiprocessing
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms

from paperlib import config, datasets, inputs, networks, runs, training

CLASSES, BATCH = 10, 32
FEATURES = (3, 3, 192)  # of EfficientNet-Lite0's trunk at 112 px
SETTINGS = training.Settings()
NEEDED = {"in place": 0.95, "pipeline": 1.3, "processes": 1.7}


# ---------------------------------------------------------------- what is trained


def job(network, augment):
    demo = config.load("demo").job("digits", "ce", 0)
    return replace(demo, inputs=replace(demo.inputs, network=network, augment=augment), batch_size=BATCH)


def digit_images(count, side, channels):
    """Digits as uint8 images (count, side, side, channels), and their labels."""
    digits = datasets.load("digits")
    index = np.arange(count) % len(digits.images)
    images = torch.from_numpy(digits.images[index]).permute(0, 3, 1, 2)
    images = datasets.resize(images, side) if side != images.shape[-1] else images
    images = images.expand(-1, channels, -1, -1).permute(0, 2, 3, 1)
    return np.ascontiguousarray(images), digits.labels[index]


@dataclass
class InPlace:
    """Inputs that cost nothing: every batch is the same tensor."""

    batch: torch.Tensor

    def training_batch(self, index, generator):
        return self.batch


class Steps:
    """A model and its optimiser; epoch() is the project's own loop."""

    def __init__(self, job, channels=3):
        torch.manual_seed(0)
        self.job, self.model = job, training.Model(job, CLASSES, channels)
        self.model.to(memory_format=torch.channels_last)
        self.optimiser = torch.optim.Adam(self.model.parameter_groups(job), weight_decay=1e-4, fused=True)
        self.scaler = torch.amp.GradScaler("cuda", enabled=False)
        self.generators = [torch.Generator().manual_seed(seed) for seed in (1, 2)]

    def epoch(self, part):
        order, augmentation = self.generators
        training._train_epoch(
            self.model, self.job, part, self.optimiser, self.scaler, order, augmentation, SETTINGS, 0.0, epoch=1
        )

    def epoch_of_loader(self, loader, trunk):
        """The loop that is usually written; the same network, loss and optimiser."""
        self.model.train()
        for images, labels in loader:
            if trunk is not None:
                with torch.no_grad():
                    images = trunk(images)
            loss = torch.nn.functional.cross_entropy(self.model(images), labels)
            self.optimiser.zero_grad(set_to_none=True)
            loss.backward()
            self.optimiser.step()


class PilImages(Dataset):
    """A dataset as it is usually written: one PIL image at a time through torchvision's transforms."""

    def __init__(self, images, labels, transform):
        self.images, self.labels, self.transform = images, labels, transform

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.transform(Image.fromarray(self.images[index].squeeze())), int(self.labels[index])


def usual_loader(images, labels, network, side, augment):
    spec = networks.SPECS[network]
    steps = [transforms.Resize((side, side))] if images.shape[1] != side else []
    if augment:
        steps += [transforms.RandomCrop(side, padding=side // 8, padding_mode="reflect")]
        steps += [transforms.RandomHorizontalFlip()]
    mean, std = ([value / 255 for value in values] for values in (spec.mean, spec.std))
    steps += [transforms.ToTensor(), transforms.Normalize(mean, std)]
    dataset = PilImages(images, labels, transforms.Compose(steps))
    return DataLoader(dataset, BATCH, shuffle=True, num_workers=0)


# ---------------------------------------------------------------- the three measurements


def cpu_seconds(function):
    """Of this process alone, so that other work on the machine counts as little as it can."""
    started = time.process_time()
    function()
    return time.process_time() - started


def interleaved(first, second, repetitions):
    """Median seconds of two functions that take turns, and the median of their ratios second / first."""
    first(), second()
    pairs = [(cpu_seconds(first), cpu_seconds(second)) for _ in range(repetitions)]
    return median(a for a, _ in pairs), median(b for _, b in pairs), median(b / a for a, b in pairs)


def image_part(network, side, channels, count, augment):
    images, labels = digit_images(count, side, channels)
    source = inputs.ImageInputs(images, network, side, augment)
    return training.Part(source, torch.from_numpy(labels)), images, labels


def feature_part(folder, count):
    rng = np.random.default_rng(0)
    files = [Path(folder) / f"{view}.npy" for view in ("plain", "flip")]
    for file in files:
        np.save(file, rng.normal(size=(count, *FEATURES)).astype(np.float16))
    labels = torch.from_numpy(rng.integers(0, CLASSES, count))
    return training.Part(inputs.FeatureInputs(files), labels)


def against_in_place(name, steps, part, repetitions):
    """The project's epoch against its own steps on one batch."""
    batch = part.inputs.training_batch(torch.arange(BATCH), torch.Generator().manual_seed(0))
    still = training.Part(InPlace(batch), part.labels)
    real, pure, ratio = interleaved(lambda: steps.epoch(part), lambda: steps.epoch(still), repetitions)
    count = len(part.labels)
    return name, "in place", count / real, count / pure, ratio


def against_pipeline(name, steps, part, loader, repetitions, trunk=None):
    """The project's epoch against DataLoader + PIL."""
    ours, usual, ratio = interleaved(
        lambda: steps.epoch(part), lambda: steps.epoch_of_loader(loader, trunk), repetitions
    )
    count = len(part.labels)
    return name, "pipeline", count / ours, len(loader.dataset) / usual, ratio * count / len(loader.dataset)


def serve(connection, count):
    """A one-thread process that trains an epoch whenever asked, and says how fast it was."""
    torch.set_num_threads(1)
    part, _, _ = image_part("compact_resnet", 32, 3, count, augment=True)
    steps = Steps(job("compact_resnet", augment=True))
    steps.epoch(part)
    while connection.recv():
        started = time.perf_counter()
        steps.epoch(part)
        connection.send(count / (time.perf_counter() - started))


def two_against_one(count, repetitions):
    """Throughput of two processes side by side over that of one alone, by the clock."""
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for _ in range(2):
        pipe, other = context.Pipe()
        process = context.Process(target=serve, args=(other, count), daemon=True)
        process.start()
        pipes.append(pipe)
        processes.append(process)

    def rates(active):
        for pipe in active:
            pipe.send(True)
        return sum(pipe.recv() for pipe in active)

    rates(pipes)
    rounds = [(rates(pipes[turn % 2 : turn % 2 + 1]), rates(pipes)) for turn in range(repetitions)]
    for pipe, process in zip(pipes, processes, strict=True):
        pipe.send(False)
        process.join()
    one, both = (median(pair[side] for pair in rounds) for side in (0, 1))
    return [("two processes, by the clock", "processes", both, one, median(pair[1] / pair[0] for pair in rounds))]


def measure(quick):
    torch.set_num_threads(1)
    images, repetitions = (640, 5) if quick else (3200, 11)
    rows = []
    compact, tail = Steps(job("compact_resnet", True)), Steps(job("efficientnet_lite0", True))
    part, pixels, labels = image_part("compact_resnet", 32, 3, images, augment=True)
    rows.append(against_in_place("compact ResNet, 32 px", compact, part, repetitions))
    with tempfile.TemporaryDirectory() as folder:
        features = feature_part(folder, images)
        rows.append(against_in_place("cached features", tail, features, repetitions))
        tiny_part, tiny_pixels, tiny_labels = image_part("tiny", 8, 1, images, augment=False)
        loader = usual_loader(tiny_pixels, tiny_labels, "tiny", 8, augment=False)
        rows.append(
            against_pipeline("tiny network, digits", Steps(job("tiny", False), 1), tiny_part, loader, repetitions)
        )
        loader = usual_loader(pixels, labels, "compact_resnet", 32, augment=True)
        rows.append(against_pipeline("compact ResNet, 32 px", compact, part, loader, repetitions))
        few = images // 10  # the trunk is slow: fewer images, the ratio is by image
        loader = usual_loader(pixels[:few], labels[:few], "efficientnet_lite0", 112, augment=True)
        trunk, _ = networks.frozen_trunk("efficientnet_lite0", pretrained=False)
        rows.append(against_pipeline("cached features", tail, features, loader, max(3, repetitions // 3), trunk))
    return rows + two_against_one(images, repetitions)


# ---------------------------------------------------------------- the page


TITLES = {
    "in place": "A real epoch against the same steps on a batch that is in place",
    "pipeline": "An epoch against DataLoader + PIL transforms, one thread each",
    "processes": "Two one-thread processes against one",
}
SIDES = {
    "in place": ("real epoch", "batch in place"),
    "pipeline": ("this project", "DataLoader + PIL"),
    "processes": ("two processes", "one process"),
}


def page(rows, quick):
    lines = [
        "# Speed of training",
        "",
        f"Written by `python benchmarks/training.py{' --quick' if quick else ''}`: images a second, batch {BATCH}, "
        "cross-entropy.",
        "Medians of interleaved repetitions in CPU seconds of the process (by the clock only where it says so); a",
        "ratio is the median of the repetitions' own ratios.",
        "Cached features are random numbers of the right shape; the pipeline beside them runs the frozen trunk.",
        f"{runs._hardware('cpu')}, {os.cpu_count()} cores, torch {torch.__version__}.",
    ]
    for kind, title in TITLES.items():
        ours, other = SIDES[kind]
        lines += ["", f"## {title}", "", f"Needed: at least {NEEDED[kind]}.", ""]
        lines += [f"| | {ours} | {other} | ratio | reached |", "|---|---|---|---|---|"]
        for name, found, first, second, ratio in rows:
            if found == kind:
                reached = "yes" if ratio >= NEEDED[kind] else "no"
                lines.append(f"| {name} | {first:,.0f} | {second:,.0f} | {ratio:.2f} | {reached} |")
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="smaller and fewer: about a minute")
    quick = parser.parse_args().quick
    text = page(measure(quick), quick)
    path = Path(__file__).parents[1] / "docs" / "benchmarks" / "training.md"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
