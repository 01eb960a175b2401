"""A scale's configuration, typed and checked; and the jobs it asks for. Fast to import: no torch, no numpy."""

import difflib
import hashlib
import json
import re
from dataclasses import asdict, dataclass, field, replace
from functools import cache

import jsonschema
import yaml

from paperlib import paths
from paperlib.errors import UserError
from paperlib.recipes import RECIPES

SCALES = ("demo", "cpu", "paper")
COLLAPSE = "collapse_"  # a run of the collapse figure is named collapse_<run>
OTHER_SPLIT = "split_"  # cross-entropy members trained on another split are named split_<its seed>
FROZEN_TRUNK = ("efficientnet_lite0",)  # networks whose features are cached (D22); networks.SPECS says the same


class ConfigError(UserError):
    """A configuration that cannot be used; the message names the file, the key and what is valid."""


@dataclass(frozen=True)
class DatasetConfig:
    members: int
    seeds: int
    subset: int | None = None
    source_size: int | None = None


@dataclass(frozen=True)
class Split:
    fractions: tuple
    seed: int
    by_group: bool = False


@dataclass(frozen=True)
class Training:
    epochs_ce: int
    epochs_edl: int
    batch_size: int
    lr_backbone: float
    lr_head: float
    weight_decay: float
    keep: str
    augment: bool


@dataclass(frozen=True)
class Losses:
    kl_schedule: str
    lambda0: float
    lambda_ev: float


@dataclass(frozen=True)
class Analysis:
    bins: int
    high_confidence: float
    risk: float
    delta: float
    aggregate: str
    fixed_point_iterations: int
    fixed_point_tolerance: float


@dataclass(frozen=True)
class Collapse:
    dataset: str
    network: str
    image_size: int
    epochs: int
    runs: dict


@dataclass(frozen=True)
class SplitSensitivity:
    """A small ensemble of one dataset on each of some other splits."""

    dataset: str
    seeds: tuple
    members: int


@dataclass(frozen=True)
class Hardware:
    """How to compute, not what: nothing here enters a model's digest."""

    device: str = "auto"
    amp: bool = True
    tf32: bool = True
    deterministic: bool = False
    models_per_gpu: int = 1
    models_per_job: int = 5


@dataclass(frozen=True)
class InputSpec:
    """What a network is fed; the same for all models of a dataset, so that it is loaded once."""

    dataset: str
    subset: int | None
    source_size: int | None
    split: Split
    network: str
    image_size: int
    views: tuple | None
    augment: bool


@dataclass(frozen=True)
class Job:
    """Everything that determines one trained model. What a recipe does not use is None and cannot change it."""

    inputs: InputSpec
    run: str
    recipe: str
    seed: int
    pretrained: bool
    epochs: int
    batch_size: int
    lr_backbone: float
    lr_head: float
    weight_decay: float
    keep: str
    kl_schedule: str | None
    lambda0: float | None
    lambda_ev: float | None

    @property
    def digest(self):
        """Short hash of all fields: two jobs with one digest give one model."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:16]

    def __str__(self):
        return f"{self.inputs.dataset}/{self.run}/seed {self.seed}"


@dataclass(frozen=True)
class Scale:
    """One scale: what is trained on what, and how it is analysed."""

    scale: str
    network: str
    image_size: int
    datasets: dict
    split: Split
    training: Training
    losses: Losses
    ensemble: dict
    analysis: Analysis
    collapse: Collapse
    pretrained: bool = False
    data_folder: str | None = None
    views: tuple | None = None
    split_sensitivity: SplitSensitivity | None = None
    recipes: dict = field(default_factory=dict)
    hardware: Hardware = field(default_factory=Hardware)

    def runs(self, dataset):
        """Names of the runs of a dataset: the seven recipes; collapse runs and other splits where they belong."""
        collapse = self.collapse.runs if dataset == self.collapse.dataset else ()
        moved = self.split_sensitivity
        splits = moved.seeds if moved and dataset == moved.dataset else ()
        return [*RECIPES, *(COLLAPSE + name for name in collapse), *(f"{OTHER_SPLIT}{seed}" for seed in splits)]

    def seeds(self, dataset, run):
        """Seeds to train of a run: members for `ce`, seeds for the evidential recipes, one for a collapse run."""
        chosen = self.datasets[dataset]
        if run.startswith(COLLAPSE):
            return range(1)
        if run.startswith(OTHER_SPLIT):
            return range(self.split_sensitivity.members)
        return range(chosen.members if run == "ce" else chosen.seeds)

    def jobs(self, dataset, run):
        """All jobs of a run, one a seed."""
        return [self.job(dataset, run, seed) for seed in self.seeds(dataset, run)]

    def portions(self, dataset, run):
        """{name of a manifest: the jobs it lists}: models_per_job consecutive seeds of a run each."""
        jobs, step = self.jobs(dataset, run), self.hardware.models_per_job
        return {f"{run}-{first:03d}.json": jobs[first : first + step] for first in range(0, len(jobs), step)}

    def job(self, dataset, run, seed):
        """The job of one model."""
        if dataset not in self.datasets:
            raise ConfigError(f"scale {self.scale} has no dataset {dataset!r}; it has: {', '.join(self.datasets)}")
        if run not in self.runs(dataset):
            raise ConfigError(
                f"{dataset} has no run {run!r} at scale {self.scale}; it has: {', '.join(self.runs(dataset))}"
            )
        chosen, training, split = self.datasets[dataset], self.training, self.split
        if run.startswith(OTHER_SPLIT):
            split = replace(split, seed=int(run.removeprefix(OTHER_SPLIT)))
        recipe = "ce" if run.startswith(OTHER_SPLIT) else run
        inputs = InputSpec(
            dataset=dataset,
            subset=chosen.subset,
            source_size=chosen.source_size,
            split=split,
            network=self.network,
            image_size=self.image_size,
            views=self.views,
            augment=training.augment,
        )
        job = Job(
            inputs=inputs,
            run=run,
            recipe=recipe,
            seed=seed,
            pretrained=self.pretrained,
            epochs=training.epochs_ce if recipe == "ce" else training.epochs_edl,
            batch_size=training.batch_size,
            lr_backbone=training.lr_backbone,
            lr_head=training.lr_head,
            weight_decay=training.weight_decay,
            keep=training.keep,
            **asdict(self.losses),
        )
        if run.startswith(COLLAPSE):
            collapse = self.collapse
            job = replace(  # from random initialisation (D20), so one learning rate for the whole network
                job,
                inputs=replace(inputs, network=collapse.network, image_size=collapse.image_size, views=None),
                recipe="mse_clamp",
                pretrained=False,
                epochs=collapse.epochs,
                lr_backbone=training.lr_head,
                **collapse.runs[run.removeprefix(COLLAPSE)],
            )
        else:
            job = replace(job, **self.recipes.get(recipe, {}))
        return _without_unused(job)


def _without_unused(job):
    regulariser = RECIPES[job.recipe].regulariser
    if regulariser != "kl":
        job = replace(job, kl_schedule=None)
    if regulariser != "kl" or job.kl_schedule in ("none", "warmup"):
        job = replace(job, lambda0=None)
    if regulariser != "log_evidence":
        job = replace(job, lambda_ev=None)
    return job


def load(scale, overrides=None):
    """The configuration config/<scale>.yaml, checked; overrides is a nested dict that replaces single values."""
    if scale not in SCALES:
        raise ConfigError(f"unknown scale {scale!r}; choose one of: {', '.join(SCALES)}")
    path = paths.root() / "config" / f"{scale}.yaml"
    try:
        content = yaml.safe_load(path.read_text())
    except FileNotFoundError:
        raise ConfigError(f"{path} is missing: run from inside the repository or set PAPERLIB_HOME") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from None
    return parse(_merged(content, overrides) if overrides else content, path.name)


def parse(content, source):
    """A Scale from a nested dict; source names the file in error messages."""
    _validate(content, source)
    content = dict(content)
    content["datasets"] = {name: DatasetConfig(**value) for name, value in content["datasets"].items()}
    split = dict(content["split"], fractions=tuple(content["split"]["fractions"]))
    content["split"] = Split(**split)
    for key, kind in (("training", Training), ("losses", Losses), ("analysis", Analysis)):
        content[key] = kind(**content[key])
    content["collapse"] = Collapse(**content["collapse"])
    content["hardware"] = Hardware(**content.get("hardware", {}))
    if "split_sensitivity" in content:
        moved = dict(content["split_sensitivity"], seeds=tuple(content["split_sensitivity"]["seeds"]))
        content["split_sensitivity"] = SplitSensitivity(**moved)
    if "views" in content:
        content["views"] = tuple(content["views"])
    scale = Scale(**content)
    _check_together(scale, source)
    return scale


def _check_together(scale, source):
    if scale.collapse.dataset not in scale.datasets:
        raise ConfigError(f"{source}: collapse.dataset {scale.collapse.dataset!r} is not one of this scale's datasets")
    if (moved := scale.split_sensitivity) and moved.dataset not in scale.datasets:
        raise ConfigError(f"{source}: split_sensitivity.dataset {moved.dataset!r} is not one of this scale's datasets")
    if moved and scale.split.seed in moved.seeds:
        raise ConfigError(f"{source}: split_sensitivity.seeds has split.seed {scale.split.seed}: name other splits")
    if abs(sum(scale.split.fractions) - 1) > 1e-9:
        raise ConfigError(f"{source}: split.fractions must sum to 1, got {list(scale.split.fractions)}")
    for name, dataset in scale.datasets.items():
        if max(scale.ensemble["sizes"]) > dataset.members:
            raise ConfigError(
                f"{source}: ensemble.sizes asks for {max(scale.ensemble['sizes'])} members, "
                f"but datasets.{name}.members is {dataset.members}"
            )
    if scale.views and "plain" not in scale.views:
        raise ConfigError(f"{source}: views must include 'plain', which evaluation uses")
    if scale.network in FROZEN_TRUNK and not (scale.views and scale.pretrained):
        raise ConfigError(f"{source}: {scale.network} has a frozen trunk: it needs views and pretrained: true")
    if scale.network not in FROZEN_TRUNK and scale.views:
        raise ConfigError(f"{source}: views are for a network with a frozen trunk, which {scale.network} has not")


@cache
def schema():
    """The JSON schema of a scale's configuration."""
    return yaml.safe_load((paths.root() / "config" / "schema.yaml").read_text())


def _validate(content, source):
    if not isinstance(content, dict):
        raise ConfigError(f"{source} must be a mapping of keys to values, got {type(content).__name__}")
    errors = sorted(jsonschema.Draft202012Validator(schema()).iter_errors(content), key=lambda e: [*map(str, e.path)])
    if errors:
        raise ConfigError("\n".join(_explain(error, source) for error in errors))


def _explain(error, source):
    place = ".".join(map(str, error.absolute_path)) or "top level"
    if error.validator != "additionalProperties":
        return f"{source}: {place}: {error.message}"
    properties, patterns = error.schema.get("properties", {}), error.schema.get("patternProperties", {})
    known = [*properties, *(name for pattern in patterns for name in re.findall(r"\w+(?=[|)])", pattern))]
    lines = []
    for key in map(str, error.instance):
        if key in properties or any(re.search(pattern, key) for pattern in patterns):
            continue
        near = difflib.get_close_matches(key, known, n=1, cutoff=0)
        hint = f"did you mean {near[0]!r}?" if near else f"a name must match {' or '.join(patterns)}"
        lines.append(f"{source}: unknown key {key!r} in {place}; {hint}")
    return "\n".join(lines)


def _merged(base, changes):
    merged = dict(base)
    for key, value in changes.items():
        nested = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merged(merged[key], value) if nested else value
    return merged
