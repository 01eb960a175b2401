"""The only reader and writer of results. One compressed .npz a model, complete or not there at all.

A prediction file holds, readable with numpy alone (docs/data.md):
    calibration, test           (inputs, classes) log-probabilities of the predictive mean less the largest of
                                their row, float16 in two byte planes (2, inputs, classes) uint8, low byte first:
                                that compresses far better. Less the logsumexp of a row they are normalised
    calibration_log_alpha0, test_log_alpha0   (inputs,) float32, evidential recipes only
    history, history_columns    (epochs, columns) float32 and the columns' names
    provenance                  a JSON text: job, versions, hardware, weights, data, time, commit
"""

import errno
import io
import json
import os
import tempfile
import zipfile
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from paperlib import paths
from paperlib.config import OTHER_SPLIT
from paperlib.errors import UserError

PARTS = ("calibration", "test")
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
LOCKED = (errno.EROFS, errno.EACCES, errno.EPERM)


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
    mend = _mend_prediction(path)
    arrays = _load(path, "prediction", mend, (*PARTS, "history", "history_columns", "provenance"))
    provenance = json.loads(str(arrays["provenance"]))
    if digest is not None and provenance.get("digest") != digest:
        raise RecordError(
            f"{path} holds {_name(provenance)}, trained with another configuration "
            f"(digest {provenance.get('digest')}, expected {digest}); restore the configuration, or {mend}"
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
    parts = ("train", "validation", *PARTS)
    arrays = _load(path, "split", _mend_split(path), (*parts, *(f"{part}_labels" for part in parts), "class_names"))
    return SplitRecord(
        **{part: arrays[part] for part in parts},
        labels={part: arrays[f"{part}_labels"] for part in parts},
        class_names=tuple(str(name) for name in arrays["class_names"]),
    )


@contextmanager
def replacing(path):
    """A temporary name beside path that becomes path when the block ends well, and vanishes otherwise."""
    path = Path(path)
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}-", suffix=path.suffix)
        os.close(handle)
        temporary = Path(name)
        yield temporary
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except OSError as error:
        raise unwritable(path, error) from error
    finally:
        if temporary is not None:
            with suppress(OSError):  # the reason why it cannot be removed was told above
                temporary.unlink(missing_ok=True)


def check_writable(folder):
    """Make sure that a block can be written to folder: better told now than after hours of training."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(bytes(4096))
    except OSError as error:
        raise unwritable(folder, error) from error


def unwritable(path, error):
    """The RecordError for a path that the system refused to write: why, and what to do."""
    if error.errno in LOCKED:
        mend = "make its folder writable"
    elif error.errno in (*FULL, None):  # numpy reports a short write without a number
        mend = "make room on its disk"
    else:
        mend = "mend that"
    return RecordError(
        f"{path} could not be written: {error.strerror or error}; {mend} and run the same command again, "
        "what is finished is kept"
    )


def _load(path, kind, mend, names):
    try:
        with zipfile.ZipFile(path) as archive:  # reads each member to its end, and so compares its checksum
            members = {name.removesuffix(".npy"): archive.read(name) for name in archive.namelist()}
        arrays = {name: np.load(io.BytesIO(content), allow_pickle=False) for name, content in members.items()}
    except FileNotFoundError:
        raise RecordError(f"{path} is not there; {mend}") from None
    except PermissionError as error:
        raise RecordError(f"{path} could not be read: {error.strerror}; make it readable") from error
    except MemoryError:
        raise  # says nothing about the file
    except Exception as error:  # damage shows as errors of zipfile, zlib, struct or numpy, whichever meets it first
        raise RecordError(f"{path} is damaged ({error}); {mend}") from error
    missing = [name for name in names if name not in arrays]
    if missing:
        raise RecordError(f"{path} is no {kind} file: it lacks {', '.join(missing)}; {mend}")
    return arrays


def _mend_prediction(path):
    place = _below_results(path)
    seed = Path(path).stem.removeprefix("seed_")
    if len(place) != 5 or not seed.isdecimal():  # no result of the workflow: a point of a grid, or a file of one's own
        return "delete it and run again"
    scale, _, dataset, run, _ = place
    command = f"--scale {scale} --dataset {dataset} --recipe {run} --seeds {int(seed)} --replace"
    return f"train it with: python -m paperlib train {command}{_or_restore(path)}"


def _mend_split(path):
    place = _below_results(path)
    if len(place) != 3:
        return "delete it and run again"
    command = f"--scale {place[0]} --dataset {Path(path).stem.partition('-')[0]}"
    return f"delete what is there and write it with: python -m paperlib train {command}{_or_restore(path)}"


def _below_results(path):
    try:
        return Path(path).relative_to(paths.root() / "results").parts
    except ValueError:
        return ()


def _or_restore(path):
    return f"\nor, if it was released, restore it with: git checkout -- {Path(path).relative_to(paths.root())}"


def _name(provenance):
    job = provenance.get("job", {})
    return f"{job['inputs']['dataset']}/{job['run']}/seed {job['seed']}" if job else "a model"


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
