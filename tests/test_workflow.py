"""The DAG: what runs, what does not run again, and what a mistake looks like. One small real run serves all tests."""

import html
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from conftest import REPOSITORY, change_config, shrink_demo
from synthetic import write_release
from test_notebooks import nbval, with_another_number

from paperlib import catalogue, config

COPIED = ("Snakefile", "rules", "profiles", "notebooks", "paperlib")


def snakemake(home, *arguments):
    environment = dict(os.environ, PAPERLIB_HOME=str(home), PYTHONPATH=str(home), OMP_NUM_THREADS="1")
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    return subprocess.run(
        [sys.executable, "-m", "snakemake", "--cores", "2", *arguments],
        cwd=home,
        env=environment,
        capture_output=True,
        text=True,
    )


def planned(home, *arguments):
    """Rules with outputs that a dry-run would execute, with how often."""
    done = snakemake(home, "--dry-run", *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = (done.stdout + done.stderr).splitlines()
    if "Job stats:" not in lines:
        return {}
    table = lines[lines.index("Job stats:") + 3 :]
    rows = [line.split() for line in table[: table.index("")]]
    return {name: int(count) for name, count in rows if name not in ("all", "demo", "cpu", "paper", "total")}


def trained(home, *arguments):
    """Runs that a dry-run would train."""
    done = snakemake(home, "--dry-run", *arguments)
    return set(re.findall(r"training (\w+) on digits", done.stdout + done.stderr))


def new_repository(home):
    """The repository's code and notebooks at home, with the demo scale shrunk."""
    for name in COPIED:
        source = REPOSITORY / name
        (shutil.copytree if source.is_dir() else shutil.copy)(source, home / name)
    shrink_demo(home)
    return home


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A repository whose shrunk demo scale has been run once."""
    home = new_repository(tmp_path_factory.mktemp("repository"))
    change_config(home, "demo", lambda content: content["training"].update(epochs_ce=6, epochs_edl=6))
    done = snakemake(home, "demo")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return home


@pytest.fixture
def repository(built, tmp_path):
    """A copy of it that a test may change; file times are kept."""
    home = tmp_path / "copy"
    shutil.copytree(built, home, symlinks=True)
    return home


def test_every_figure_table_notebook_and_page_is_made(built):
    pairs = [(name, catalogue.ALL if name == "claims" else "digits") for name in catalogue.NOTEBOOKS]
    for notebook, dataset in pairs:
        for ending in ("ipynb", "html"):
            assert (built / "results/demo/notebooks" / f"{notebook}-{dataset}.{ending}").stat().st_size > 1000
    for item in catalogue.ITEMS:
        for file in item.files("demo", dict(pairs)[item.notebook]):
            assert (built / file).stat().st_size > 0, file
    index = html.unescape((built / "results/demo/notebooks/index.html").read_text())
    assert all(item.title in index for item in catalogue.ITEMS)


def test_pages_need_no_network(built):
    for page in (built / "results/demo/notebooks").glob("*.html"):
        text = page.read_text()
        assert "<script" not in text and "http://" not in text.replace("http://www.w3.org", "")
        assert 'src="http' not in text and "@import" not in text
        assert not re.search(r"<m[a-z]+[^>]*>\\\\", text), "a formula was not understood"
        if page.stem != "index":
            assert "data:image/png;base64" in text


def test_a_second_run_does_nothing(built):
    assert planned(built, "demo") == {}


def test_touching_a_plot_function_does_not_retrain(repository):
    with (repository / "paperlib" / "plots.py").open("a") as plots:
        plots.write("\n# another colour\n")
    jobs = planned(repository, "demo")
    assert "train" not in jobs
    assert set(catalogue.NOTEBOOKS) <= set(jobs)


def test_changing_one_recipes_weight_retrains_that_recipe_only(repository):
    change_config(repository, "demo", lambda content: content["losses"].update(lambda_ev=0.5))
    assert trained(repository, "demo") == {"digamma"}
    change_config(repository, "demo", lambda content: content.update(recipes={"mse_plusone": {"lambda0": 0.5}}))
    assert trained(repository, "demo") == {"digamma", "mse_plusone"}


def test_adding_seeds_trains_the_new_seeds_only(repository):
    change_config(repository, "demo", lambda content: content["datasets"]["digits"].update(members=4))
    assert planned(repository, "demo")["train"] == 1
    folder = repository / "results/demo/predictions/digits/ce"
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    done = snakemake(repository, "results/demo/manifests/digits/ce-000.json")
    assert done.returncode == 0 and "4 models asked for, 3 there, 1 to train" in done.stdout + done.stderr
    after = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert set(after) - set(before) == {"seed_003.npz"}
    assert all(after[name] == content for name, content in before.items())


def test_any_single_result_is_a_target_by_its_path(built):
    target = "figures/demo/digits/exp3_mom.pdf"
    jobs = planned(built, "--force", target)
    assert jobs == {"exp3_selective_classification": 1}


@pytest.fixture(scope="module")
def released(tmp_path_factory):
    """A repository with a small released `cpu` scale, as a fresh clone has it: no data, nothing built."""
    home = new_repository(tmp_path_factory.mktemp("released"))

    def shrink(content):
        content["datasets"] = {"dermamnist": {"members": 4, "seeds": 2}}
        content["collapse"]["dataset"] = "dermamnist"
        content["ensemble"]["sizes"] = [2, 4]

    change_config(home, "cpu", shrink)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PAPERLIB_HOME", str(home))
        write_release(config.load("cpu"))
    return home


def test_released_predictions_are_rebuilt_from_and_never_retrained(released):
    jobs = planned(released, "cpu")
    assert "train" not in jobs and jobs["exp3_selective_classification"] == 1
    retrained = planned(released, "cpu", "--config", "retrain=true")
    assert retrained["train"] == len(list((released / "results/cpu/manifests").rglob("*.json")))


def test_after_a_clone_file_times_mean_nothing(released, tmp_path):
    home = tmp_path / "clone"
    shutil.copytree(released, home)
    target = "results/cpu/.built/fig1_softmax_variability-dermamnist"
    assert snakemake(home, target).returncode == 0
    assert planned(home, target) == {}
    clone = tmp_path / "second"
    shutil.copytree(home, clone, ignore=shutil.ignore_patterns(".snakemake", ".built"))
    for number, path in enumerate(sorted(clone.rglob("*"))):
        os.utime(path, (1e9 + number % 7, 1e9 + number % 7))
    assert planned(clone, target) == {"fig1_softmax_variability": 1}
    first = {p.name: p.read_bytes() for p in (home / "results/cpu/notebooks").iterdir()}
    assert snakemake(clone, target).returncode == 0
    assert {p.name: p.read_bytes() for p in (clone / "results/cpu/notebooks").iterdir()} == first


def test_nbval_accepts_an_executed_notebook_and_finds_a_changed_number(repository):
    executed = repository / "results/demo/notebooks/exp3_selective_classification-digits.ipynb"
    same = nbval(executed, PAPERLIB_HOME=str(repository))
    assert same.returncode == 0, same.stdout[-3000:]
    with_another_number(executed)
    changed = nbval(executed, PAPERLIB_HOME=str(repository))
    assert changed.returncode == 1 and "failed" in changed.stdout


def test_papermill_runs_a_notebook_with_parameters(built, tmp_path):
    source = built / "notebooks" / "fig_single_model_risk_coverage.ipynb"
    command = [sys.executable, "-m", "papermill", "-k", "python3", "-p", "scale", "demo", "-p", "dataset", "digits"]
    done = subprocess.run(
        [*command, str(source), str(tmp_path / "out.ipynb")],
        cwd=built,
        env=os.environ | {"PAPERLIB_HOME": str(built)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "a spread of" in (tmp_path / "out.ipynb").read_text()


@pytest.mark.skipif(not (REPOSITORY / "results/cpu/splits/cifar10.npz").exists(), reason="CIFAR-10 is not released")
def test_a_notebook_runs_as_it_opens_in_jupyterlab(built, tmp_path):
    """Its own parameters, which are of the released scale, and its own folder, as JupyterLab starts it."""
    release, copy = REPOSITORY / "results" / "cpu", built / "results" / "cpu"
    shutil.copytree(release / "predictions" / "cifar10" / "ce", copy / "predictions" / "cifar10" / "ce")
    shutil.copytree(release / "splits", copy / "splits")
    source = built / "notebooks" / "fig1_softmax_variability.ipynb"
    command = [sys.executable, "-m", "nbconvert", "--to", "notebook", "--execute", "--output-dir", str(tmp_path)]
    done = subprocess.run([*command, str(source)], cwd=source.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_report_shows_figures_and_tables_by_notebook_and_dataset(built):
    done = snakemake(built, "demo", "--report", "report.html")
    assert done.returncode == 0, done.stderr[-2000:]
    report = (built / "report.html").read_text()
    assert all(item.title in report for item in catalogue.ITEMS if "'" not in item.title)


def test_a_scale_without_released_predictions_is_left_out(built):
    assert planned(built, "cpu") == {}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config", "retrian=true"], "unknown option --config retrian=...; did you mean retrain?"),
        (["--config", "retrain=yes"], "say true or false"),
        (["results/demo/manifests/digits/nonsense-000.json"], "MissingRuleException"),
    ],
)
def test_mistakes_on_the_command_line_end_in_one_message(built, arguments, message):
    done = snakemake(built, "--dry-run", *arguments)
    assert done.returncode != 0
    assert message in done.stdout + done.stderr


def test_a_bad_configuration_is_named(repository):
    change_config(repository, "demo", lambda content: content["training"].update(epoch_ce=3))
    done = snakemake(repository, "--dry-run", "demo")
    assert done.returncode != 0
    assert "unknown key 'epoch_ce' in training; did you mean 'epochs_ce'?" in done.stdout + done.stderr


def test_a_failed_notebook_keeps_its_output_and_names_it(repository):
    (repository / "results/demo/predictions/digits/ce/seed_001.npz").write_bytes(b"no prediction")
    done = snakemake(repository, "--force", "results/demo/.built/fig1_softmax_variability-digits")
    text = done.stdout + done.stderr
    assert done.returncode != 0
    assert "seed_001.npz is damaged" in text and "logs/demo/fig1_softmax_variability-digits.ipynb" in text
    assert (repository / "logs/demo/fig1_softmax_variability-digits.ipynb").exists()
    assert "Traceback (most recent call last)" not in text


def test_the_cluster_profile_is_accepted_and_groups_the_notebooks(built):
    pytest.importorskip("snakemake_executor_plugin_slurm")
    default, cluster = (
        yaml.safe_load((REPOSITORY / "profiles" / name / "config.yaml").read_text()) for name in ("default", "slurm")
    )
    assert {key: cluster.get(key) for key in default} == default | {"resources": None}
    assert set(cluster["groups"]) == set(catalogue.NOTEBOOKS) - {"claims"}
    done = snakemake(built, "--profile", "profiles/slurm", "--dry-run", "--forceall", "demo")
    assert done.returncode == 0, done.stderr[-2000:]
    assert (done.stdout + done.stderr).count("Group job notebooks-digits") == 2


def test_the_snakefile_is_a_table_of_contents():
    assert len((REPOSITORY / "Snakefile").read_text().splitlines()) <= 50


def test_the_paper_scale_has_the_jobs_that_its_configuration_asks_for(built):
    scale = config.parse(yaml.safe_load((REPOSITORY / "config" / "paper.yaml").read_text()), "paper.yaml")
    step = scale.hardware.models_per_job
    jobs = planned(built, "paper")
    expected = sum(
        -(-len(scale.seeds(dataset, run)) // step) for dataset in scale.datasets for run in scale.runs(dataset)
    )
    assert jobs["train"] == expected
    notebooks = sum(jobs[name] for name in catalogue.NOTEBOOKS)
    assert notebooks == len(catalogue.notebooks(scale))
