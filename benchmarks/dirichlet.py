"""Speed of `paperlib.dirichlet` against what a user would pick instead, as ratios in one run on one thread.

    python benchmarks/dirichlet.py [--ensemble FILE.npy] [--output docs/benchmarks/dirichlet.md]

Simulated ensembles have the logits a + b with a ~ N(0, 3^2) for each input and class and b ~ N(0, 1) for each
member besides. The real one is FILE.npy, log-probabilities (members, inputs, classes), or the released or demo
predictions of cross-entropy. Times are processor times of the thread, the best of several repeats, so that other
work on the machine counts little.
"""

import argparse
import functools
import os
import platform
import sys
import time
import tracemalloc
from importlib.metadata import version
from pathlib import Path

for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ[variable] = "1"

# This file has the name of the package it is compared with.
sys.path = [folder for folder in sys.path if Path(folder).resolve() != Path(__file__).resolve().parent]

import dirichlet as pypi_dirichlet  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
from scipy.special import log_softmax  # noqa: E402

from paperlib import dirichlet, paths, records  # noqa: E402

MEMBERS, INPUTS = 50, 1000
PYPI_INPUTS = 40
EULER = 0.5772156649015329


def simulated(classes, members=MEMBERS, inputs=INPUTS, seed=0):
    rng = np.random.default_rng(seed)
    logits = 3 * rng.normal(size=(inputs, classes)) + rng.normal(size=(members, inputs, classes))
    return log_softmax(logits, axis=-1)


def real_ensemble():
    """The largest stored cross-entropy ensemble, with its name; None if there is none."""
    folders = [f for scale in ("cpu", "demo") for f in paths.results(scale).glob("predictions/*/ce")]
    sizes = [len(list(folder.glob("seed_*.npz"))) for folder in folders]
    if not folders or max(sizes) < 2:
        return None
    folder = folders[int(np.argmax(sizes))]
    scale, dataset = folder.parts[-4], folder.parts[-2]
    seeds = sorted(int(file.stem.removeprefix("seed_")) for file in folder.glob("seed_*.npz"))
    return f"{dataset}, scale {scale}", np.asarray(records.read_log_probs(scale, dataset, "ce", seeds, "test"))


def best_time(function, repeats):
    function()
    times = []
    for _ in range(repeats):
        start = time.thread_time()
        function()
        times.append(time.thread_time() - start)
    return min(times)


def plain_numpy(probs):
    """Method of moments as one would write it."""
    mean, variance = probs.mean(axis=0), probs.var(axis=0, ddof=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        estimates = mean * (1 - mean) / variance - 1
    valid = np.isfinite(estimates) & (estimates > 0)
    return mean * (np.where(valid, estimates, 0).sum(axis=1) / valid.sum(axis=1))[:, None]


def plain_torch(log_probs, start):
    """Twenty fixed-point steps for all inputs at once, with five Newton steps for each inverse digamma."""
    mean_log, alpha = log_probs.mean(dim=0), start
    for _ in range(20):
        y = torch.digamma(alpha.sum(dim=1, keepdim=True)) + mean_log
        alpha = torch.where(y >= -2.22, torch.exp(y) + 0.5, -1 / (y + EULER))
        for _ in range(5):
            alpha = alpha - (torch.digamma(alpha) - y) / torch.polygamma(1, alpha)
    return alpha


def likelihood_rows(name, log_probs, bar):
    members, inputs, classes = log_probs.shape
    probs = np.exp(log_probs)
    fit = dirichlet.fit_mle(log_probs)
    ours = best_time(lambda: dirichlet.fit_mle(log_probs), 15) / inputs
    some = np.linspace(0, inputs - 1, min(PYPI_INPUTS, inputs)).astype(int)
    some = [i for i in some if fit.flags[i] == 0]

    def package():
        for i in some:
            pypi_dirichlet.mle(probs[:, i], method="fixedpoint")

    theirs = best_time(package, 1) / len(some)
    tensor, start = torch.from_numpy(log_probs), torch.from_numpy(dirichlet.fit_moments(probs).alpha)
    batched = best_time(lambda: plain_torch(tensor, start), 2) / inputs
    paper = dirichlet.fit_fixed_point(log_probs)
    distance = np.abs(paper.alpha0 / fit.alpha0 - 1)[fit.converged]
    title = f"{name}: M {members}, N {inputs}, K {classes}"
    print(
        f"{title}: {fit.converged.mean():.1%} converged in {fit.iterations.max()} iterations at most; 20 fixed-point "
        f"steps: {paper.converged.mean():.1%} converged, relative error of alpha_0 median {np.median(distance):.2g}"
    )
    return [
        (title, "`fit_mle`", "`dirichlet.mle(method='fixedpoint')`", ours, theirs, theirs / ours, "at least", bar),
        (title, "`fit_mle`", "20 fixed-point steps, batched torch", ours, batched, batched / ours, "at least", 10),
    ]


def moment_rows(name, log_probs):
    probs = np.exp(log_probs)
    members, inputs, classes = probs.shape
    ours = best_time(lambda: dirichlet.fit_moments(probs), 60) / inputs
    plain = best_time(lambda: plain_numpy(probs), 30) / inputs
    read = best_time(probs.sum, 60) / inputs
    title = f"{name}: M {members}, N {inputs}, K {classes}"
    return [
        (title, "`fit_moments`", "plain numpy (mean, var, divide)", ours, plain, plain / ours, "at least", 3),
        (title, "`fit_moments`", "reading the array once (sum)", ours, read, ours / read, "at most", 4),
    ]


def growth_rows():
    """Exponents of the time in M, N and K, each from a quarter to four times the middle of the others."""
    rows = []
    for name in ("fit_moments", "fit_mle"):
        for axis in ("members", "inputs", "classes"):
            sizes = {"members": 32, "inputs": 500, "classes": 32}
            factors, times = np.array([1 / 4, 1 / 2, 1, 2, 4]), []
            for factor in factors:
                arguments = sizes | {axis: int(sizes[axis] * factor)}
                data = simulated(**arguments)
                data = np.exp(data) if name == "fit_moments" else data
                times.append(best_time(functools.partial(getattr(dirichlet, name), data), 7))
            exponent = np.polyfit(np.log(factors), np.log(times), 1)[0]
            rows.append((f"`{name}`: exponent of the time in {axis}", exponent, 1.1))
    return rows


def memory_rows():
    rows = []
    for name, fit in (
        ("fit_moments", dirichlet.fit_moments),
        ("fit_mle", dirichlet.fit_mle),
        ("fit_fixed_point", dirichlet.fit_fixed_point),
    ):
        for dtype in (np.float16, np.float32, np.float64):
            data = simulated(100)
            data = (np.exp(data) if name == "fit_moments" else data).astype(dtype)
            fit(data[:, :10])
            tracemalloc.start()
            fit(data)
            peak = tracemalloc.get_traced_memory()[1] + data.nbytes
            tracemalloc.stop()
            rows.append(
                (f"`{name}`: peak memory with the input, {np.dtype(dtype)}, M 50, K 100", peak / data.nbytes, 2.5)
            )
    return rows


def machine():
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        model = f"{names[0]}, {len(names)} cores" if names else model
    packages = ", ".join(f"{name} {version(name)}" for name in ("numpy", "numba", "torch", "scipy", "dirichlet"))
    return f"{model}; {platform.system()}; Python {platform.python_version()}; {packages}"


def reached(value, direction, bar):
    return "yes" if (value >= bar if direction == "at least" else value <= bar) else "no"


def report(speeds, limits):
    lines = [
        "# Speed of the Dirichlet estimators",
        "",
        "Written by `python benchmarks/dirichlet.py`; its head says how the ensembles are made and timed. One thread.",
        f"Machine: {machine()}.",
        "",
        "| ensemble | estimator | against | µs an input | µs the other | ratio | asked | reached |",
        "|---|---|---|---:|---:|---:|---|---|",
    ]
    for title, estimator, other, ours, theirs, ratio, direction, bar in speeds:
        lines.append(
            f"| {title} | {estimator} | {other} | {ours * 1e6:.3g} | {theirs * 1e6:.3g} | {ratio:.3g} "
            f"| {direction} {bar} | {reached(ratio, direction, bar)} |"
        )
    lines += ["", "| quantity | value | asked | reached |", "|---|---:|---|---|"]
    for quantity, value, bar in limits:
        lines.append(f"| {quantity} | {value:.2f} | at most {bar} | {reached(value, 'at most', bar)} |")
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ensemble", type=Path, help="log-probabilities (members, inputs, classes), .npy")
    parser.add_argument("--output", type=Path, default=Path(__file__).parents[1] / "docs/benchmarks/dirichlet.md")
    arguments = parser.parse_args()
    torch.set_num_threads(1)

    ensembles = [("simulated", simulated(10), 1000), ("simulated", simulated(100), 300)]
    real = (arguments.ensemble.stem, np.load(arguments.ensemble)) if arguments.ensemble else real_ensemble()
    if real is not None:
        ensembles.append((*real, 1000 if real[1].shape[2] < 100 else 300))
    speeds = [row for name, log_probs, bar in ensembles for row in likelihood_rows(name, log_probs, bar)]
    speeds += [row for name, log_probs, _ in ensembles for row in moment_rows(name, log_probs)]
    text = report(speeds, growth_rows() + memory_rows())
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
