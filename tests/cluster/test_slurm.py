"""The demo scale on a real SLURM of one node, through profiles/slurm: `make test-cluster`, some minutes, as root.

The daemons are Debian's, with ports, keys and folders of their own; they end with the tests.
"""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest
from conftest import change_config
from test_workflow import new_repository

PROGRAMS = ("setpriv", "munged", "slurmctld", "slurmd", "sbatch", "squeue", "scancel", "scontrol", "srun")
MISSING = [program for program in PROGRAMS if not shutil.which(program)]
pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="slurmd starts jobs as their users and so must be root"),
    pytest.mark.skipif(bool(MISSING), reason=f"{', '.join(MISSING)} missing: apt-get install slurm-wlm munge"),
]

# CPUs, memory and the GPU are declared, not there: four jobs share whatever the machine has, and nothing uses the GPU.
SLURM_CONF = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmdPort={node_port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
SchedulerParameters=sched_interval=2,bf_interval=2
SlurmdParameters=config_overrides
ReturnToService=2
MpiDefault=none
GresTypes=gpu
NodeName={host} NodeAddr=127.0.0.1 CPUs=4 RealMemory=20000 Gres=gpu:1 State=UNKNOWN
PartitionName=main Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""


LIMIT = 3600  # seconds for a run: minutes on two idle cores, much longer where others compute
STARTED = []  # runs of snakemake; none outlives the tests


def command(*words):
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout


def wait_until(condition, seconds, what):
    """The first true value of condition(), or a failure that says what was waited for."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if found := condition():
            return found
        time.sleep(0.5)
    raise AssertionError(f"{what}: not within {seconds} s")


@contextmanager
def daemon(folder, *words):
    """A daemon in the foreground, with a log beside its files; ends with the block, or with pytest if killed."""
    guarded = ("setpriv", "--pdeathsig", "TERM", *words)
    with (folder / f"{words[0]}.log").open("w") as log:
        process = subprocess.Popen(guarded, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def free_ports(number):
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


@pytest.fixture(scope="module")
def cluster():
    """A SLURM of one node; SLURM_CONF leads every command to it."""
    with ExitStack() as stack:
        # Not pytest's own folder: the name of a socket must be short.
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="slurm-", ignore_cleanup_errors=True)))
        folder.chmod(0o711)
        key = folder / "munge.key"
        key.touch(0o600)
        key.write_bytes(os.urandom(128))
        for name in ("state", "spool"):
            (folder / name).mkdir()
        host, (controller_port, node_port) = socket.gethostname().split(".")[0], free_ports(2)
        (folder / "slurm.conf").write_text(
            SLURM_CONF.format(folder=folder, host=host, controller_port=controller_port, node_port=node_port)
        )
        (folder / "cgroup.conf").write_text("CgroupAutomount=no\n")
        (folder / "gres.conf").write_text(f"NodeName={host} Name=gpu File=/dev/null\n")
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        for name in [name for name in os.environ if name.startswith(("SLURM_", "SBATCH_", "SQUEUE_"))]:
            patch.delenv(name)
        patch.setenv("SLURM_CONF", str(folder / "slurm.conf"))
        # The plugin hides SLURM_CONF from srun, which looks for the file where the machine has it: not so here.
        srun = folder / "bin" / "srun"
        srun.parent.mkdir()
        srun.write_text(f'#!/bin/sh\nSLURM_CONF={folder}/slurm.conf exec {shutil.which("srun")} "$@"\n')
        srun.chmod(0o755)
        patch.setenv("PATH", f"{srun.parent}{os.pathsep}{os.environ['PATH']}")
        files = {name: f"--{name}-file={folder}/munge.{name}" for name in ("key", "pid", "seed")}
        socket_file = folder / "munge.socket"
        logs = lambda: "\n".join(path.read_text()[-2000:] for path in folder.glob("*.log"))  # noqa: E731
        stack.enter_context(daemon(folder, "munged", "--foreground", f"--socket={socket_file}", *files.values()))
        wait_until(socket_file.exists, 20, "munge.socket")
        stack.enter_context(daemon(folder, "slurmctld", "-D", "-i"))
        stack.enter_context(daemon(folder, "slurmd", "-D"))
        try:
            wait_until(lambda: "idle" in subprocess.getoutput("sinfo --noheader --format=%T"), 60, "an idle node")
        except AssertionError as error:
            pytest.fail(f"{error}\n{logs()}")
        yield folder
        for process in STARTED:
            process.kill()
        subprocess.run(["scancel", "--state=PENDING"])
        subprocess.run(["scancel", "--state=RUNNING"])
        wait_until(lambda: not queue("PENDING", "RUNNING", "COMPLETING"), 60, "an empty queue")


def queue(*states):
    """Jobs in these states: number and what it is for, from the comment that the plugin gives it."""
    rows = command("squeue", "--noheader", f"--states={','.join(states)}", "--format=%A|%k").splitlines()
    return dict(row.split("|") for row in rows)


def prepared(home):
    """The repository at home, the members trained long enough for an interruption in the middle."""
    home.mkdir(exist_ok=True)
    new_repository(home)
    change_config(home, "demo", lambda content: content["training"].update(epochs_ce=20))
    return home


def start(home, *arguments):
    """snakemake with arguments, its output in home/snakemake.log."""
    environment = dict(os.environ, PAPERLIB_HOME=str(home), PYTHONPATH=str(home))
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    words = ("setpriv", "--pdeathsig", "KILL", sys.executable, "-m", "snakemake", *arguments)
    with (home / "snakemake.log").open("a") as log:
        STARTED.append(subprocess.Popen(words, cwd=home, env=environment, stdout=log, stderr=subprocess.STDOUT))
    return STARTED[-1]


def output(home):
    return (home / "snakemake.log").read_text()


def end(process, home, seconds=LIMIT):
    """Wait for snakemake; it must succeed."""
    try:
        code = process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.terminate()
        process.wait()
        code = f"none within {seconds} s"
    assert code == 0, f"snakemake ended with code {code}:\n{output(home)[-6000:]}"


# The only settings besides the profile: look often, for the sake of small jobs.
SLURM = ("--profile", "profiles/slurm", "--slurm-init-seconds-before-status-checks", "5", "--latency-wait", "10")


def contents(home):
    """Everything that a run leaves: files by name; of predictions the arrays, without times and provenance."""
    found = {}
    for path in sorted([*(home / "results" / "demo").rglob("*"), *(home / "figures" / "demo").rglob("*")]):
        name = str(path.relative_to(home))
        if path.suffix == ".npz":
            with np.load(path) as arrays:
                for key in set(arrays) - {"provenance"}:
                    values = arrays[key]
                    if key == "history":
                        values = values[:, arrays["history_columns"] != "seconds"]
                    found[f"{name}:{key}"] = values.tobytes()
        elif path.is_file():
            found[name] = path.read_bytes()
    return found


def test_training_jobs_ask_for_a_gpu_each_and_snakemake_does_not_hold_them_back(cluster, tmp_path):
    home = prepared(tmp_path)
    targets = [f"results/demo/manifests/digits/{run}-000.json" for run in ("mse_only", "collapse_no_kl")]
    process = start(home, *SLURM, "--set-resources", "train:gpu=1", "train:mem_mb=2500", "--", *targets)
    jobs = wait_until(lambda: len(found := queue("PENDING", "RUNNING")) == 2 and found, 120, "two jobs in the queue")
    shown = [command("scontrol", "show", "job", number) for number in jobs]
    end(process, home)
    for job in shown:
        assert "TresPerJob=gres:gpu:1" in job and "MinMemoryNode=2500M" in job and "NumCPUs=1 " in job
    print(f"jobs {', '.join(jobs)} were in the queue together, TresPerJob=gres:gpu:1 each")


def test_a_run_with_a_killed_main_process_and_a_cancelled_job_ends_as_a_local_one(cluster, tmp_path):
    local, remote = prepared(tmp_path / "local"), prepared(tmp_path / "remote")
    members = remote / "results/demo/predictions/digits/ce"
    begun = time.monotonic()

    # The main process is killed while its jobs run: they go on until somebody cancels them.
    process = start(remote, *SLURM, "demo")
    wait_until(lambda: queue("RUNNING"), 120, "a running job")
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert queue("PENDING", "RUNNING")
    run = re.search(r"SLURM run ID: (\S+)", output(remote)).group(1)
    command("scancel", f"--name={run}")
    wait_until(lambda: not queue("PENDING", "RUNNING", "COMPLETING"), 60, "an empty queue")
    print(f"main process killed after {time.monotonic() - begun:.0f} s, jobs of run {run} cancelled")
    end(start(remote, "--unlock", "--cores", "1"), remote)

    # The same command again; the job that trains the members is cancelled after the first of three.
    process = start(remote, *SLURM, "demo")
    wait_until(lambda: (members / "seed_000.npz").exists(), 600, "the first member")
    (cancelled,) = [number for number, what in queue("RUNNING").items() if "_ce_000" in what]
    command("scancel", cancelled)
    assert not (members / "seed_002.npz").exists(), "the training was too short to be interrupted"
    grouped, deadline = None, time.monotonic() + LIMIT
    while process.poll() is None and time.monotonic() < deadline:  # a look at a job of several notebooks
        rows = [number for number, what in queue("RUNNING").items() if "notebooks-digits" in what]
        grouped = grouped or (rows and command("scontrol", "show", "job", rows[0]))
        time.sleep(1)
    end(process, remote, seconds=1)
    seconds = time.monotonic() - begun

    text = output(remote)
    jobs = sorted(map(int, re.findall(r"submitted with SLURM jobid (\d+)", text)))
    assert f"SLURM-job '{cancelled}' failed, SLURM status is: 'CANCELLED'" in text
    log = (remote / "logs/demo/manifests/digits-ce-000.log").read_text()
    there = int(re.search(r"3 models asked for, (\d) there", log).group(1))
    assert there >= 1, "the second attempt did not go on where the first had stopped"
    asked = re.search(r"NumCPUs=(\d).*TRES=\S*mem=(\d+)M", grouped, re.DOTALL).groups()
    assert asked in {("4", "8000"), ("3", "6000")} and "gpu" not in grouped
    assert "TimeLimit=00:30:00" in grouped

    begun = time.monotonic()
    end(start(local, "--cores", "2", "demo"), local)
    expected, found = contents(local), contents(remote)
    assert set(found) == set(expected)
    different = [name for name in expected if found[name] != expected[name]]
    assert not different
    print(f"SLURM: {len(jobs)} jobs of both runs in {seconds:.0f} s; locally {time.monotonic() - begun:.0f} s")
    print(f"job {cancelled} cancelled; submitted again by itself, {there} of its 3 models were there")
    print(f"a job of notebooks asked for {asked[0]} CPUs and {asked[1]} MB")
    print(f"{len(expected)} files and arrays, equal byte by byte")
