"""Released predictions put to the test: some of them are trained anew and compared with what is stored."""

import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from paperlib import paths, records, runs

# Other hardware or versions round otherwise, and training carries that on. How far it comes was measured
# (docs/results.md): beyond these it is another model.
MEAN_DISTANCE = 0.03
ACCURACY_GAP = 0.02
SAME_MACHINE = ("hardware", "versions", "weights", "threads")


@dataclass(frozen=True)
class Comparison:
    """A stored prediction and the same job trained anew: same bits, same machine, and how far apart."""

    job: object
    identical: bool
    same_machine: bool
    same_data: bool
    distance: float
    accuracy_gap: float

    @property
    def good(self):
        if self.same_machine or not self.same_data:
            return self.identical
        return self.distance <= MEAN_DISTANCE and self.accuracy_gap <= ACCURACY_GAP

    def __str__(self):
        if self.identical:
            return f"{self.job}: identical to what is stored"
        if not self.same_data:
            return (
                f"{self.job}: CANNOT BE COMPARED: the images are not those it was trained on, so neither are the "
                "test inputs; docs/datasets.md says what was used"
            )
        machine = "hardware and versions of the same names" if self.same_machine else "other hardware or versions"
        return (
            f"{self.job}: {'agrees with' if self.good else 'DIFFERS FROM'} what is stored ({machine}): mean distance "
            f"{self.distance:.3f} (at most {MEAN_DISTANCE}), accuracy differs by {self.accuracy_gap:.3f} "
            f"(at most {ACCURACY_GAP})"
        )


def choose(scale, names, models, seed):
    """Jobs of released predictions, so many at random of each dataset."""
    chosen = []
    for dataset in names:
        there = [
            job
            for run in scale.runs(dataset)
            for job in scale.jobs(dataset, run)
            if records.job_path(scale.scale, job).exists()
        ]
        if not there:
            raise records.RecordError(f"{paths.results(scale.scale)} holds no prediction of {dataset}")
        picked = np.random.default_rng(seed).choice(len(there), min(models, len(there)), replace=False)
        chosen += [there[number] for number in sorted(picked)]
    return chosen


def retrain(scale, jobs, settings, workers):
    """Train jobs anew in a folder that is thrown away; yields a Comparison, or the Done of a failed job."""
    with tempfile.TemporaryDirectory() as folder:
        tasks = [runs.Task(job, str(Path(folder) / f"{number}.npz"), settings) for number, job in enumerate(jobs)]
        path_of = {task.job: task.path for task in tasks}
        runs.prepare_features(tasks, workers)
        for done in runs.run(tasks, workers):
            if done.error:
                yield done
            else:
                yield compare(scale, done.job, path_of[done.job])


def compare(scale, job, path):
    """The stored prediction of a job against one trained anew."""
    stored, anew = records.job_path(scale.scale, job), Path(path)
    released, trained = (records.read_prediction(file, job.digest) for file in (stored, anew))
    before, after = released.provenance, trained.provenance
    same_data = before.get("data") == after.get("data")
    distance = accuracy_gap = np.nan
    if same_data:
        labels = records.read_split(records.split_path(scale.scale, job.inputs.dataset, job.run)).labels["test"]
        probs = [each.test.probs for each in (released, trained)]
        accuracies = [(each.argmax(axis=1) == labels).mean() for each in probs]
        distance = 0.5 * np.abs(probs[0] - probs[1]).sum(axis=1).mean()
        accuracy_gap = abs(accuracies[0] - accuracies[1])
    return Comparison(
        job,
        identical=_bits(stored) == _bits(anew),
        same_machine=all(before.get(key) == after.get(key) for key in SAME_MACHINE),
        same_data=same_data,
        distance=distance,
        accuracy_gap=accuracy_gap,
    )


def _bits(path):
    """All that a model says, as stored: its outputs and history, but for the seconds."""
    with np.load(path) as arrays:
        kept = arrays["history_columns"] != "seconds"
        said = [arrays[name] for name in sorted(arrays.files) if name.startswith(records.PARTS)]
        return b"".join(np.ascontiguousarray(array).tobytes() for array in (arrays["history"][:, kept], *said))
