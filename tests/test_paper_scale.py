"""The paper's own scale without a GPU: its rules, its network at 224 x 224 pixels, its scheduling."""

import time

import pytest
from conftest import change_config
from test_datasets import write_folder
from test_workflow import new_repository, planned, snakemake

from paperlib import config, records
from paperlib.recipes import RECIPES


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A repository with 100 small images: two steps an epoch, one epoch, random initialisation."""
    home = new_repository(tmp_path_factory.mktemp("paper"))
    write_folder(home / "data", "cifar10", count=100, size=32, per_mosaic=100, columns=10)

    def shrink(content):
        content["pretrained"] = False  # weights cannot be fetched in a test
        content["datasets"] = {"cifar10": {"members": 2, "seeds": 1, "subset": 100}}
        content["ensemble"]["sizes"] = [2]
        content["collapse"]["dataset"] = "cifar10"
        del content["split_sensitivity"]
        content["training"].update(epochs_ce=1, epochs_edl=1)

    change_config(home, "paper", shrink)
    return home


@pytest.mark.slow
def test_two_steps_of_every_recipe_through_the_rules_on_the_cpu(home, monkeypatch):
    targets = [f"results/paper/manifests/cifar10/{recipe}-000.json" for recipe in RECIPES]
    done = snakemake(home, "--config", "device=cpu", "--", *targets)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    monkeypatch.setenv("PAPERLIB_HOME", str(home))
    scale = config.load("paper")
    assert (scale.network, scale.image_size, scale.training.batch_size) == ("resnet18", 224, 32)
    for recipe in RECIPES:
        job = scale.job("cifar10", recipe, 0)
        prediction = records.read_prediction(records.job_path("paper", job), job.digest)
        assert prediction.provenance["settings"]["device"] == "cpu"
        assert len(prediction.history) == 1
        assert prediction.test.log_probs.shape == (10, 10)
    assert planned(home, *targets) == {}  # the device is how, not what: nothing is trained again


def test_without_a_gpu_a_job_says_so_at_once_and_how_to_go_on(home):
    started = time.monotonic()
    done = snakemake(home, "--resources", "gpu=1", "--", "results/paper/manifests/cifar10/collapse_flipped-000.json")
    assert done.returncode != 0
    text = done.stdout + done.stderr
    assert "trains on a GPU and none is visible to torch" in text
    assert "snakemake --config device=cpu" in text
    assert "Traceback" not in text
    assert time.monotonic() - started < 60


@pytest.mark.parametrize(
    ("models", "arguments", "expected"),
    [
        (1, [], "gpu 1, threads 1; --workers 1  --replace"),
        (3, [], "gpu 1, threads 3; --workers 3  --replace"),
        (3, ["--config", "device=cuda:1"], "gpu 1, threads 3; --workers 3 --device cuda:1 --replace"),
        (3, ["--config", "device=cpu"], "gpu 0, threads 1; --workers 1 --device cpu --replace"),
    ],
)
def test_a_training_job_takes_one_gpu_and_its_models_share_it(home, models, arguments, expected):
    change_config(home, "paper", lambda content: content["hardware"].update(models_per_gpu=models))
    rule = home / "rules" / "train.smk"  # a dry run prints no resources: let the job's message say them
    rule.write_text(rule.read_text().replace('"training {', '"gpu {resources.gpu}, threads {threads}; training {'))
    target = "results/paper/manifests/cifar10/collapse_no_kl-000.json"
    limits = ["--cores", "8", "--resources", "gpu=4"]
    done = snakemake(home, "--dry-run", "--printshellcmds", *limits, *arguments, "--", target)
    text = done.stdout + done.stderr
    assert done.returncode == 0, text
    assert all(piece in text for piece in expected.split("; ")), text


def test_an_unknown_device_is_named(home):
    done = snakemake(home, "--config", "device=tpu", "--", "results/paper/manifests/cifar10/collapse_no_kl-000.json")
    assert done.returncode != 0
    assert "unknown device 'tpu'; choose one of: cpu, cuda, cuda:N" in done.stdout + done.stderr


def test_a_dry_run_of_the_whole_scale_takes_less_than_half_a_minute(tmp_path):
    home = new_repository(tmp_path)
    started = time.monotonic()
    assert planned(home, "paper")["train"] > 90
    assert time.monotonic() - started < 30
