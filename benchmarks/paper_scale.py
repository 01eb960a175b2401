"""Time and memory of the whole analysis at the paper's size, on drawn predictions.

Writes docs/benchmarks/paper_scale.md.

CIFAR-100 in full: 50 members, 60 evidential and 5 collapse runs, 6,000 calibration and 6,000 test inputs, 100 classes.
Every notebook is run as the workflow runs it. Needs 0.5 GB of disk. Run: python benchmarks/paper_scale.py
"""

import argparse
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml

REPOSITORY = Path(__file__).parents[1]
sys.path.insert(0, str(REPOSITORY / "tests"))

from synthetic import write_release  # noqa: E402

from paperlib import catalogue, config  # noqa: E402

PAGE = REPOSITORY / "docs" / "benchmarks" / "paper_scale.md"
LIMIT_GIGABYTES = 4
# Runs a command and prints the largest memory of any process below it, in kB.
PEAK = """
import resource, subprocess, sys
subprocess.run(sys.argv[1:], check=True)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""


def make(home, inputs):
    """A repository whose paper scale is CIFAR-100 alone, with all its predictions."""
    for name in ("notebooks", "config"):
        shutil.copytree(REPOSITORY / name, home / name)
    shutil.copy(REPOSITORY / "Snakefile", home)
    path = home / "config" / "paper.yaml"
    content = yaml.safe_load(path.read_text())
    content["datasets"] = {"cifar100": content["datasets"]["cifar100"]}
    del content["split_sensitivity"]  # of another dataset
    path.write_text(yaml.safe_dump(content))
    os.environ["PAPERLIB_HOME"] = str(home)
    scale = config.load("paper")
    write_release(scale, inputs=inputs, classes=100)
    return scale


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=6000, help="calibration inputs, and test inputs")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = os.environ["NUMBA_NUM_THREADS"] = "1"
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        started = time.perf_counter()
        scale = make(Path(folder), options.inputs)
        print(f"drew the predictions in {time.perf_counter() - started:.0f} s", flush=True)
        for notebook, dataset in catalogue.notebooks(scale):
            command = [sys.executable, "-m", "paperlib", "notebook", notebook, "--scale", "paper", "--dataset", dataset]
            started = time.perf_counter()
            done = subprocess.run(
                [sys.executable, "-c", PEAK, *command], cwd=folder, check=True, capture_output=True, text=True
            )
            rows.append((notebook, time.perf_counter() - started, int(done.stdout.split()[-1]) / 2**20))
            print(f"{notebook}: {rows[-1][1]:.0f} s, {rows[-1][2]:.2f} GB", flush=True)
    largest = max(memory for _, _, memory in rows)
    text = "\n".join(f"| {name} | {seconds:.0f} | {memory:.2f} |" for name, seconds, memory in rows)
    PAGE.write_text(
        "# The whole analysis at the paper's size\n\n"
        "Written by `python benchmarks/paper_scale.py`: drawn predictions of CIFAR-100 in full (50 members, 60\n"
        f"evidential and 5 collapse runs, {options.inputs:,} calibration and {options.inputs:,} test inputs, 100\n"
        "classes), every notebook as the workflow runs it, one thread, one after the other.\n\n"
        f"| notebook | seconds | largest memory of a process (GB) |\n|---|---|---|\n{text}\n"
        f"| all | {sum(seconds for _, seconds, _ in rows):.0f} | {largest:.2f} |\n\n"
        f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the end, Python {platform.python_version()}.\n"
    )
    if largest > LIMIT_GIGABYTES:
        sys.exit(f"{largest:.2f} GB are more than the {LIMIT_GIGABYTES} GB that the analysis may take")


if __name__ == "__main__":
    main()
