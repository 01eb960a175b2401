"""The only reader and writer of results. One compressed .npz a model, complete or not there at all.

A prediction file holds, readable with numpy alone (docs/data.md):
    calibration, test           (inputs, classes) log-probabilities of the predictive mean less the largest of
                                their row, float16 in two byte planes (2, inputs, classes) uint8, low byte first:
                                that compresses far better. Less the logsumexp of a row they are normalised
    calibration_log_alpha0, test_log_alpha0   (inputs,) float32, evidential recipes only
    history, history_columns    (epochs, columns) float32 and the columns' names
    provenance                  a JSON text: job, versions, hardware, weights, data, time, commit
"""

import json
import os
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from paperlib import paths
from paperlib.config import OTHER_SPLIT
from paperlib.errors import UserError

PARTS = ("calibration", "test")


class RecordError(UserError):
    """A result that is missing, damaged or of another configuration; the message names the file."""


@dataclass(frozen=True)
class Outputs:
    """What one model says of some inputs: log of the predictive mean and, for a Dirichlet, log alpha_0."""

    log_probs: np.ndarray
    log_alpha0: np.ndarray | None = None

    @property
    def probs(self):
        return np.exp(self.log_probs)

    @property
    def alpha(self):
        if self.log_alpha0 is None:
            raise RecordError("these are softmax outputs of cross-entropy; they have no concentrations")
        return np.exp(self.log_probs + self.log_alpha0[:, None])


@dataclass(frozen=True)
class Prediction:
    """A trained model's outputs on the calibration and the test split, its history and its provenance."""

    calibration: Outputs
    test: Outputs
    history: pd.DataFrame
    provenance: dict


@dataclass(frozen=True)
class SplitRecord:
    """Indices of the four parts into the pooled dataset, with the labels of all parts."""

    train: np.ndarray
    validation: np.ndarray
    calibration: np.ndarray
    test: np.ndarray
    labels: dict
    class_names: tuple


def prediction_path(scale, dataset, run, seed):
    """Where the prediction of one model is."""
    return paths.results(scale) / "predictions" / dataset / run / f"seed_{seed:03d}.npz"


def job_path(scale, job):
    """Where the prediction of a job is."""
    return prediction_path(scale, job.inputs.dataset, job.run, job.seed)


def split_path(scale, dataset, run="ce"):
    """Where the split of a dataset is; members trained on another split have their own."""
    name = f"{dataset}-{run}" if run.startswith(OTHER_SPLIT) else dataset
    return paths.results(scale) / "splits" / f"{name}.npz"


def write_prediction(path, prediction):
    """Store a prediction: to a temporary name first, then moved, so that no half of one is ever there."""
    arrays = {
        "history": prediction.history.to_numpy(np.float32),
        "history_columns": np.array(prediction.history.columns, dtype=str),
        "provenance": np.array(json.dumps(prediction.provenance, sort_keys=True)),
    }
    for part in PARTS:
        outputs = getattr(prediction, part)
        arrays[part] = _planes(outputs.log_probs)
        if outputs.log_alpha0 is not None:
            arrays[f"{part}_log_alpha0"] = outputs.log_alpha0.astype(np.float32)
    with replacing(path) as temporary:
        np.savez_compressed(temporary, **arrays)


def read_prediction(path, digest=None):
    """Load a prediction; with a digest, make sure that it belongs to that job."""
    arrays = _load(path, "a prediction; train it with: python -m paperlib train")
    _require(arrays, (*PARTS, "history", "history_columns", "provenance"), path, "prediction")
    provenance = json.loads(str(arrays["provenance"]))
    if digest is not None and provenance.get("digest") != digest:
        raise RecordError(
            f"{path} was trained with another configuration (digest {provenance.get('digest')}, expected {digest}); "
            "delete it to train it anew, or restore the configuration"
        )
    outputs = {
        part: Outputs(_normalised(arrays[part]), _as_float64(arrays.get(f"{part}_log_alpha0"))) for part in PARTS
    }
    columns = [str(name) for name in arrays["history_columns"]]
    history = pd.DataFrame(arrays["history"].astype(np.float64), columns=columns)
    return Prediction(**outputs, history=history, provenance=provenance)


def read_log_probs(scale, dataset, run, seeds, part):
    """Log-probabilities of several models, (models, inputs, classes)."""
    predictions = (read_prediction(prediction_path(scale, dataset, run, seed)) for seed in seeds)
    return np.stack([getattr(prediction, part).log_probs for prediction in predictions])


def write_manifest(path, scale, jobs):
    """List the predictions of jobs with their digests: the workflow's sign that they are there."""
    rows = []
    for job in jobs:
        file = job_path(scale, job)
        rows.append({"file": str(file.relative_to(paths.root())), "digest": job.digest})
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(rows, indent=1) + "\n")


def is_done(path, digest):
    """Whether the prediction of that job is there and whole; a damaged or foreign file is an error."""
    if not Path(path).exists():
        return False
    read_prediction(path, digest)
    return True


def write_split(path, split):
    """Store a split."""
    arrays = {part: getattr(split, part) for part in ("train", "validation", *PARTS)}
    arrays |= {f"{part}_labels": labels for part, labels in split.labels.items()}
    with replacing(path) as temporary:
        np.savez_compressed(temporary, class_names=np.array(split.class_names, dtype=str), **arrays)


def read_split(path):
    """Load a split."""
    arrays = _load(path, "a split; it is written when a model of the dataset is trained")
    parts = ("train", "validation", *PARTS)
    _require(arrays, (*parts, *(f"{part}_labels" for part in parts), "class_names"), path, "split")
    return SplitRecord(
        **{part: arrays[part] for part in parts},
        labels={part: arrays[f"{part}_labels"] for part in parts},
        class_names=tuple(str(name) for name in arrays["class_names"]),
    )


@contextmanager
def replacing(path):
    """A temporary name beside path that becomes path when the block ends well, and vanishes otherwise."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}-", suffix=path.suffix)
    os.close(handle)
    try:
        yield Path(temporary)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except OSError as error:
        raise RecordError(f"{path} could not be written: {error.strerror or error}") from error
    finally:
        Path(temporary).unlink(missing_ok=True)


def _load(path, what):
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in arrays.files}
    except FileNotFoundError:
        raise RecordError(f"{path} is not there: {what}") from None
    except Exception as error:  # damage shows as errors of zipfile, zlib, struct or numpy, whichever meets it first
        raise RecordError(f"{path} is damaged ({error}); delete it and run again") from error


def _require(arrays, names, path, kind):
    missing = [name for name in names if name not in arrays]
    if missing:
        raise RecordError(f"{path} is no {kind} file: it lacks {', '.join(missing)}")


def _planes(log_probs):
    # Less the largest, which is then exactly 0: rounding cannot make a tie of it and the runner-up, and the
    # nearer a class is to the largest, the more digits its distance keeps.
    halves = np.ascontiguousarray(log_probs - log_probs.max(axis=-1, keepdims=True), dtype="<f2")
    return np.moveaxis(halves.view(np.uint8).reshape(*halves.shape, 2), -1, 0)


def _normalised(planes):
    halves = np.ascontiguousarray(np.moveaxis(planes, 0, -1)).view("<f2")[..., 0].astype(np.float64)
    return halves - np.log(np.exp(halves).sum(axis=-1, keepdims=True))  # no overflow: the largest is 0


def _as_float64(array):
    return None if array is None else array.astype(np.float64)
