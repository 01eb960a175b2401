"""Time and memory of `paperlib fit` on an ensemble of one .npy a member. Writes docs/benchmarks/own_ensemble.md.

50 members x 1,000,000 inputs x 10 classes need 2 GB of disk, in --folder. Run: python benchmarks/own_ensemble.py
"""

import argparse
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from scipy import special

PAGE = Path(__file__).parents[1] / "docs" / "benchmarks" / "own_ensemble.md"
CALIBRATION, TEST = 0.1, 0.1
GENERATED_AT_ONCE = 100_000


def make(folder, members, inputs, classes):
    """Softmax outputs whose members disagree more on harder inputs; true classes; a tenth each for both parts."""
    labels = np.random.default_rng(0).integers(0, classes, inputs)
    files = [folder / f"member_{member:03d}.npy" for member in range(members)]
    for member, file in enumerate(files):
        stored = np.lib.format.open_memmap(file, "w+", np.float32, (inputs, classes))
        for start in range(0, inputs, GENERATED_AT_ONCE):
            rows = slice(start, min(start + GENERATED_AT_ONCE, inputs))
            shared, own = np.random.default_rng((1, start)), np.random.default_rng((2, start, member))
            size = (rows.stop - start, classes)
            hard = shared.gamma(2, 0.6, (size[0], 1)).astype(np.float32)
            logits = 4 * np.eye(classes, dtype=np.float32)[labels[rows]]
            logits += hard * (shared.standard_normal(size, np.float32) + 0.5 * own.standard_normal(size, np.float32))
            stored[rows] = special.softmax(logits, axis=1)
        stored.flush()
        del stored
    part = np.full(inputs, "", "<U11")
    part[: int(CALIBRATION * inputs)] = "calibration"
    part[-int(TEST * inputs) :] = "test"
    np.save(folder / "labels.npy", np.where(part == "", -1, labels))
    np.save(folder / "split.npy", part)
    return files


def seconds_to_read(files):
    """Time to read the files once, in pieces of 16 MB."""
    started = time.perf_counter()
    for file in files:
        with file.open("rb", buffering=0) as stream:
            while stream.read(2**24):
                pass
    return time.perf_counter() - started


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=1_000_000)
    parser.add_argument("--members", type=int, default=50)
    parser.add_argument("--classes", type=int, default=10)
    parser.add_argument("--folder", help="where the files are made (default: the temporary folder)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        folder = Path(folder)
        files = make(folder, options.members, options.inputs, options.classes)
        # Twice: the first makes sure that both the reading and the fit find the files in the same state.
        seconds_to_read(files)
        reading = seconds_to_read(files)
        command = [sys.executable, "-m", "paperlib", "fit", *map(str, files), "-o", str(folder / "out")]
        command += [
            "--labels",
            str(folder / "labels.npy"),
            "--split",
            str(folder / "split.npy"),
            "--aggregate",
            "trace",
        ]
        started = time.perf_counter()
        subprocess.run(command, check=True)
        fitting = time.perf_counter() - started
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        sizes = {path.name: path.stat().st_size / 1e6 for path in sorted((folder / "out").iterdir())}
    rows = {
        "members x inputs x classes": f"{options.members} x {options.inputs:,} x {options.classes}, float32 on disk",
        "size of the files": f"{options.members * options.inputs * options.classes * 4 / 1e9:.2f} GB",
        "calibration and test inputs": f"{int(CALIBRATION * options.inputs):,} and {int(TEST * options.inputs):,}",
        "peak memory": f"{used.ru_maxrss / 2**20:.2f} GB",
        "time, all of it": f"{fitting:.1f} s, of which {used.ru_utime + used.ru_stime:.1f} s on the processor",
        "time to read the files once": f"{reading:.1f} s",
        "ratio of the two": f"{fitting / reading:.0f}",
        "outputs": ", ".join(f"{name} {size:.1f} MB" for name, size in sizes.items()),
        "machine": f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, Python {platform.python_version()}",
    }
    text = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
    PAGE.parent.mkdir(parents=True, exist_ok=True)
    PAGE.write_text(
        "# Your own ensemble: time and memory\n\n"
        "Written by `python benchmarks/own_ensemble.py`. The time is that of the whole command `paperlib fit`: start,\n"
        "reading, Dirichlets, thresholds, both tables and the report. The files were in the\n"
        "page cache for both times.\n\n"
        f"| | |\n|---|---|\n{text}\n"
    )
    print(text)


if __name__ == "__main__":
    main()
