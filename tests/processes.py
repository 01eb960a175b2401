"""Real commands in sessions of their own, for tests that kill them or take room and memory from them."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from paperlib import records

REPOSITORY = Path(__file__).resolve().parents[1]


def interruptible():
    """Undo an ignored interrupt, which a process inherits that was started in the background of a script."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


class Command:
    """`python -m MODULE ARGUMENTS` for the repository at home, its processes told from others by their session."""

    def __init__(self, home, *arguments, prefix=(), cwd=REPOSITORY):
        environment = os.environ | {"PAPERLIB_HOME": str(home), "PYTHONPATH": str(cwd), "OMP_NUM_THREADS": "1"}
        environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
        self.process = subprocess.Popen(
            [*prefix, sys.executable, "-m", *map(str, arguments)],
            cwd=cwd,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            preexec_fn=interruptible,
        )
        self.lines = []

    def wait_for(self, start):
        """Read lines until one starts so."""
        for line in self.process.stdout:
            self.lines.append(line)
            if line.startswith(start):
                return
        raise AssertionError(f"no line {start!r} in {self.lines}; {self.process.stderr.read()}")

    def end(self, timeout=240):
        out, err = self.process.communicate(timeout=timeout)
        return self.process.returncode, "".join(self.lines) + out, err

    def session(self):
        """Processes of this session that live, with their command lines."""
        found = {}
        for folder in Path("/proc").iterdir():
            if not folder.name.isdigit():
                continue
            try:
                state, _, _, session = (folder / "stat").read_text().rsplit(")", 1)[1].split()[:4]
                if int(session) == self.process.pid and state != "Z":
                    found[int(folder.name)] = (folder / "cmdline").read_text()
            except OSError:
                continue  # it ended meanwhile
        return found

    def workers(self):
        return [pid for pid, command in self.session().items() if "spawn_main" in command]

    def wait_until_gone(self, seconds=20):
        limit = time.monotonic() + seconds
        while self.session() and time.monotonic() < limit:
            time.sleep(0.05)
        assert self.session() == {}


class Training(Command):
    """`python -m paperlib train` of cross-entropy models of the demo scale."""

    def __init__(self, home, *arguments, **options):
        super().__init__(home, "paperlib", "train", "--scale", "demo", "--recipe", "ce", *arguments, **options)


def bits(path):
    """All that a model says, as stored: everything but provenance and seconds."""
    with np.load(path) as arrays:
        columns = list(arrays["history_columns"])
        history = np.delete(arrays["history"], columns.index("seconds"), axis=1)
        said = [arrays[name] for name in sorted(arrays.files) if name.startswith(records.PARTS)]
        return b"".join(array.tobytes() for array in (history, *said))


def prediction_files(home):
    return sorted((Path(home) / "results").rglob("seed_*.npz"))


def leftovers(home):
    """Temporary files below home that nothing will ever finish."""
    return [path for folder in ("results", "figures", ".cache") for path in (Path(home) / folder).rglob(".*-*")]
