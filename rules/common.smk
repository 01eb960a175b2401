# What the rules share: checked configurations, and which files belong to which job.

import difflib
import os
import shlex
import sys

from paperlib import catalogue, config as scales
from snakemake.exceptions import WorkflowError

OPTIONS = ("retrain", "device")
for key in config:
    if key not in OPTIONS:
        near = difflib.get_close_matches(key, OPTIONS, n=1, cutoff=0)[0]
        raise WorkflowError(f"unknown option --config {key}=...; did you mean {near}?")
if str(config.get("retrain", "false")).lower() not in ("true", "false"):
    raise WorkflowError(f"--config retrain={config['retrain']}: say true or false")
RETRAIN = str(config.get("retrain", "false")).lower() == "true"
DEVICE = f"--device {shlex.quote(config['device'])}" if "device" in config else ""

try:
    SCALES = {name: scales.load(name) for name in scales.SCALES}
except scales.ConfigError as error:
    raise WorkflowError(str(error)) from None

# Released predictions are inputs, never outputs: no rule trains `cpu` unless it is asked to.
TRAINED = [name for name in SCALES if name != "cpu" or RETRAIN]
DATASETS = sorted({dataset for scale in SCALES.values() for dataset in scale.datasets}) + [catalogue.ALL]
RUNS = sorted({run for scale in SCALES.values() for dataset in scale.datasets for run in scale.runs(dataset)})


wildcard_constraints:
    scale="|".join(SCALES),
    dataset="|".join(DATASETS),
    run="|".join(RUNS),
    first=r"\d{3}",
    place=r"manifests|\.built/retrained",


# One thread a process; only the environment's own kernel and packages.
shell.prefix("set -euo pipefail; export OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 PYTHONNOUSERSITE=1; ")
PYTHON = shlex.quote(sys.executable)


def portion(wildcards):
    """The jobs of one training job of the workflow."""
    return SCALES[wildcards.scale].portions(wildcards.dataset, wildcards.run)[f"{wildcards.run}-{wildcards.first}.json"]


def manifests(scale, dataset, runs):
    """Lists of predictions, one a training job. Retraining a release has lists of its own, which are not tracked."""
    place = ".built/retrained" if RETRAIN and scale == "cpu" else "manifests"
    return [
        f"results/{scale}/{place}/{dataset}/{name}" for run in runs for name in SCALES[scale].portions(dataset, run)
    ]


def on_gpu(scale):
    """Whether the scale's models train on a GPU: one job takes one, and models_per_gpu models share it."""
    return (config.get("device") or SCALES[scale].hardware.device).startswith("cuda")


def side_by_side(scale):
    """Models that one training job trains at the same time."""
    return SCALES[scale].hardware.models_per_gpu if on_gpu(scale) else 1


def is_there(scale, dataset, runs):
    """Whether a dataset's predictions are released or can be trained here."""
    return scale in TRAINED or all(os.path.exists(path) for path in manifests(scale, dataset, runs))


def read_by(notebook, scale, dataset):
    """Lists of the predictions that a notebook reads: of its dataset, or of all that are there."""
    names = [dataset]
    if dataset == catalogue.ALL or notebook == "method_overview":  # its table of datasets
        of_each = {name: catalogue.runs(notebook, SCALES[scale], name) for name in SCALES[scale].datasets}
        names = [name for name, runs in of_each.items() if name == dataset or is_there(scale, name, runs)]
    return [path for name in names for path in manifests(scale, name, catalogue.runs(notebook, SCALES[scale], name))]


def wanted(scale):
    """(notebook, dataset) pairs of a scale whose predictions are there or can be made."""
    return [
        (notebook, dataset)
        for notebook, dataset in catalogue.notebooks(SCALES[scale])
        if (paths := read_by(notebook, scale, dataset)) and (scale in TRAINED or all(map(os.path.exists, paths)))
    ]


def pages(scale):
    """What a scale ends in: its index, which needs every page, figure and table."""
    return [f"results/{scale}/.built/index"] if wanted(scale) else []
