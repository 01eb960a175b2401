"""Predictions that look trained but are drawn: for tests of what comes after training."""

import numpy as np
import pandas as pd
from scipy.special import log_softmax

from paperlib import records, splits


def write_release(scale, inputs=200, classes=5, seed=0):
    """Splits, predictions and manifests of every run of a scale, drawn from a simple model of noisy logits."""
    for dataset in scale.datasets:
        drawn = {}
        for run in scale.runs(dataset):
            path = records.split_path(scale.scale, dataset, run)
            if path not in drawn:
                drawn[path] = _draw(path, inputs, classes, np.random.default_rng([seed, len(drawn)]))
            signal, rng = drawn[path]
            for job in scale.jobs(dataset, run):
                _write(scale, job, signal, rng)
            for name, portion in scale.portions(dataset, run).items():
                records.write_manifest(
                    records.paths.results(scale.scale) / "manifests" / dataset / name, scale.scale, portion
                )


def _draw(path, inputs, classes, rng):
    """Write a split; (what its inputs look like to every model, the generator of what each adds)."""
    labels = rng.integers(classes, size=10 * inputs)
    parts = dict(zip(("train", "validation", "calibration", "test"), splits.stratified(labels), strict=True))
    split = records.SplitRecord(
        **parts,
        labels={name: labels[index] for name, index in parts.items()},
        class_names=tuple(f"class {k}" for k in range(classes)),
    )
    records.write_split(path, split)
    signal = {
        name: rng.normal(size=(len(split.labels[name]), classes)) + 2.0 * np.eye(classes)[split.labels[name]]
        for name in records.PARTS
    }
    return signal, rng


def _write(scale, job, signal, rng):
    outputs = {}
    for name, mean in signal.items():
        logits = 1.5 * mean + rng.normal(size=mean.shape)
        evidence = None if job.recipe == "ce" else rng.uniform(1.5, 4.0, size=len(mean)) + 0.3 * logits.max(axis=1)
        outputs[name] = records.Outputs(log_softmax(logits, axis=1), evidence)
    epochs = np.arange(1, 4)
    history = pd.DataFrame(
        {"epoch": epochs, "loss": 1 / epochs, "val_accuracy": 1 - 0.5 / epochs, "val_nll": 1 / epochs}
    )
    history["val_ece"], history["alpha0_mean"] = 0.1, 10.0 * epochs
    prediction = records.Prediction(**outputs, history=history, provenance={"digest": job.digest, "synthetic": True})
    path = records.prediction_path(scale.scale, job.inputs.dataset, job.run, job.seed)
    records.write_prediction(path, prediction)
