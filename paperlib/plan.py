"""What a scale costs before it is run: models, steps, images, disk, memory and hours, less what is done already."""

import math
import resource
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from paperlib import datasets, inputs, networks, records, training
from paperlib.config import COLLAPSE, OTHER_SPLIT
from paperlib.recipes import RECIPES

# A forward pass alone costs about a third of a training step of the same image.
EVALUATION_COST = 1 / 3
MEASURED_STEPS = 6


def table(scale):
    """One row a dataset and stage: what is asked for, what is there, and what the rest takes."""
    rows = []
    for dataset in scale.datasets:
        sizes = part_sizes(scale, dataset)
        for stage, names in stages(scale, dataset).items():
            jobs = [job for run in names for job in scale.jobs(dataset, run)]
            missing = [job for job in jobs if not _is_there(scale, job)]
            work = [_work(job, sizes) for job in missing]
            rows.append(
                {
                    "dataset": dataset,
                    "stage": stage,
                    "models": len(jobs),
                    "there": len(jobs) - len(missing),
                    "steps": sum(steps for steps, _, _ in work),
                    "images": sum(images for _, images, _ in work),
                    "cost": sum(cost for _, _, cost in work),
                    "megabytes": len(missing) * _stored_bytes(dataset, sizes) / 1e6,
                    "network": jobs[0].inputs.network,
                    "image_size": jobs[0].inputs.image_size,
                }
            )
    return pd.DataFrame(rows)


def stages(scale, dataset):
    """Runs of a dataset by stage: members of the ensemble, evidential recipes, collapse runs, other splits."""
    names = scale.runs(dataset)
    found = {
        "cross-entropy": ["ce"],
        "evidential": [name for name in names if name in RECIPES and name != "ce"],
        "collapse": [name for name in names if name.startswith(COLLAPSE)],
        "other splits": [name for name in names if name.startswith(OTHER_SPLIT)],
    }
    return {stage: runs for stage, runs in found.items() if runs}


def part_sizes(scale, dataset):
    """Images in the training, validation, calibration and test part, but for the rounding within classes."""
    total = scale.datasets[dataset].subset or datasets.PUBLISHED[dataset].images
    return [round(total * fraction) for fraction in scale.split.fractions]


def image_gigabytes(scale, dataset):
    """What each training process holds of a dataset: all its images, one byte a value."""
    published = datasets.PUBLISHED[dataset]
    side = scale.datasets[dataset].source_size or published.side
    return published.images * side**2 * 3 / 1e9


def _is_there(scale, job):
    try:
        return records.is_done(records.job_path(scale.scale, job), job.digest)
    except records.RecordError:  # damaged or of another configuration: it would be trained anew
        return False


def _work(job, sizes):
    """(optimiser steps, images trained on, images' cost in training images) of one model."""
    train, validation, *predicted = sizes
    seen = job.epochs * train
    evaluated = job.epochs * validation + sum(predicted)
    return job.epochs * math.ceil(train / job.batch_size), seen, seen + EVALUATION_COST * evaluated


def _stored_bytes(dataset, sizes):
    """At most, before compression: two bytes a class, four for alpha_0."""
    return sum(sizes[2:]) * (2 * len(datasets.CLASS_NAMES[dataset]) + 4)


def with_hours(plan, rates, processes=1):
    """The table with a column of hours. rates: images/s of one process by (network, image size)."""
    rate = [rates[key] for key in zip(plan.network, plan.image_size, strict=True)]
    return plan.assign(hours=plan.cost / np.array(rate) / processes / 3600)


def text(scale, plan):
    """The table for a reader, with its sums, and what has to be kept in memory and on disk."""
    shown = ["models", "there", "steps", "images", "megabytes", *(["hours"] if "hours" in plan else [])]
    total = plan[shown].sum().to_frame().T.assign(dataset="all", stage="")
    columns = ["dataset", "stage", *shown]
    formats = dict.fromkeys(shown, "{:,.0f}".format) | {"hours": "{:,.1f}".format, "megabytes": "{:,.1f}".format}
    rows = pd.concat([plan, total])[columns].to_string(index=False, formatters=formats)
    images = ", ".join(f"{name} {image_gigabytes(scale, name):.2f}" for name in scale.datasets)
    return (
        f"{scale.scale}: {plan.models.sum():,} models asked for, {plan.there.sum():,} there; the rest takes\n{rows}\n"
        f"megabytes: predictions on disk, at most; GB of images on disk and in each training process: {images}"
    )


def measure(scale, settings):
    """({(network, image size): training images/s of one process}, peak memory in GB), timed here on random images."""
    torch.set_num_threads(1)  # as every process that trains
    settings.apply()
    jobs = {}
    for dataset in scale.datasets:
        for run in scale.runs(dataset):
            job = scale.job(dataset, run, 0)
            jobs.setdefault((job.inputs.network, job.inputs.image_size), job)
    rates = {key: _images_a_second(job, settings) for key, job in jobs.items()}
    return rates, _peak_gigabytes(settings.device)


def _images_a_second(job, settings):
    classes, size = len(datasets.CLASS_NAMES[job.inputs.dataset]), MEASURED_STEPS * job.batch_size
    generator = np.random.default_rng(0)
    channels = 1 if job.inputs.dataset == "digits" else 3
    images = generator.integers(256, size=(size, job.inputs.image_size, job.inputs.image_size, channels), dtype="u1")
    labels = torch.from_numpy(generator.integers(classes, size=size)).to(settings.device)
    # Two epochs, of which the first warms up; weights are of no consequence for the time.
    job = replace(job, epochs=2, pretrained=job.pretrained and networks.SPECS[job.inputs.network].frozen_trunk)
    with tempfile.TemporaryDirectory() as folder:
        train = training.Part(_random_inputs(job, images, Path(folder), settings.device), labels)
        few = training.Part(_random_inputs(job, images[:2], Path(folder), settings.device), labels[:2])
        _, history = training.fit(job, train, few, classes, channels, settings)
    return size / history.seconds.iloc[-1]


def _random_inputs(job, images, folder, device):
    spec = job.inputs
    if not networks.SPECS[spec.network].frozen_trunk:
        return inputs.ImageInputs(images, spec.network, spec.image_size, spec.augment, device)
    trunk, _ = networks.frozen_trunk(spec.network)
    with torch.inference_mode():
        shape = trunk(torch.zeros(1, 3, spec.image_size, spec.image_size)).permute(0, 2, 3, 1).shape[1:]
    path = folder / f"{len(images)}.npy"
    np.save(path, np.random.default_rng(0).random((len(images), *shape)).astype(np.float16))
    return inputs.FeatureInputs([path] * len(spec.views), device)


def _peak_gigabytes(device):
    if device.startswith("cuda"):
        return torch.cuda.max_memory_allocated(device) / 1e9
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak * (1 if sys.platform == "darwin" else 1024) / 1e9
