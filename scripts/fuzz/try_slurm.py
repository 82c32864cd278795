"""Start a Slurm of one node with eight made-up GPUs, and run scripts/launch/slurm.sh through its cases.

Needs Debian's `slurm-wlm` and `munge`, not their services: the daemons have a folder of their own. Jobs are the starter
on the CPU, 2 prompts with 4 samples. Prints a table; exits with 1 if a case fails.
"""

import argparse
import contextlib
import getpass
import json
import os
import random
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch")
LONGEST = 900.0  # seconds that a step of a case may take
GOING = {"PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "REQUEUED"}  # states of a job that has not ended
LAUNCHERS = ("accelerate", "torchrun")
CONFIG = """
ClusterName=one
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
ReturnToService=2
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmdSpoolDir={folder}/spool
StateSaveLocation={folder}/state
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=5,sched_interval=5
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MinJobAge=3600
SlurmdTimeout=0
MessageTimeout=60
SlurmctldPort={controller}
SlurmdPort={daemon}
GresTypes=gpu
SlurmdParameters=config_overrides
FirstJobId={first}
NodeName={host} NodeAddr=127.0.0.1 CPUs=16 Sockets=1 CoresPerSocket=16 ThreadsPerCore=1 Gres=gpu:8 RealMemory=4000
PartitionName=main Nodes={host} Default=YES MaxTime=60 State=UP OverSubscribe=FORCE:4
"""


class Failed(Exception):
    """A case that did not end as it should."""


class Node:
    """A running Slurm of one node, whose jobs write below `folder`."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self.folder, self.environment = folder, environment

    def ran(self, *command: str, **environment: str) -> str:
        """Return what a command prints. Raises Failed with its error."""
        done = subprocess.run(command, cwd=self.folder, env=self.environment | environment, capture_output=True,
                              text=True)
        if done.returncode:
            raise Failed(done.stderr.strip())
        return done.stdout

    def submit(self, name: str, *arguments: str, gpus: int = 2, recipe: str = "starter", epochs: int = 2,
               **environment: str) -> str:
        """Submit scripts/launch/slurm.sh; return the job's number. arguments: of sbatch up to `--`, then of the run."""
        of_sbatch, of_run = list(arguments), []
        if "--" in of_sbatch:
            of_sbatch, of_run = of_sbatch[:of_sbatch.index("--")], of_sbatch[of_sbatch.index("--") + 1:]
        gpu = ["--gpus-per-node", str(gpus)] if gpus else []
        return self.ran("sbatch", "--parsable", "--nodes", "1", *gpu, "--time", "30", *of_sbatch,
                        str(ROOT / "scripts" / "launch" / "slurm.sh"), recipe, f"--name={name}", "--device=cpu",
                        f"--train.epochs={epochs}", "--train.prompts=2", "--train.group=4", "--eval.prompts=2",
                        "--tracker=none", *of_run, **environment).strip()

    def state(self, job: str) -> str:
        """Return the states of a job's tasks, such as RUNNING."""
        shown = self.ran("scontrol", "show", "job", "-o", job)
        return " ".join(sorted(set(re.findall(r"JobState=(\w+)", shown))))

    def end(self, job: str) -> str:
        """Return the states of a job's tasks once they have ended."""
        until(lambda: not GOING & set(self.state(job).split()), job)
        return self.state(job)

    def log(self, job: str) -> str:
        """Return all that the tasks of a job wrote."""
        return "".join(file.read_text() for file in sorted(self.folder.glob(f"slurm-{job}*.out"))).replace("\r", "\n")

    def rows(self, name: str) -> list[int]:
        """Return the epochs of a run's metrics."""
        file = self.folder / "runs" / name / "metrics.jsonl"
        return [json.loads(line)["epoch"] for line in file.read_text().splitlines()] if file.is_file() else []

    def trains(self, job: str, name: str, epochs: int = 1) -> None:
        """Wait until a run has so many epochs."""
        until(lambda: len(self.rows(name)) >= epochs or not GOING & set(self.state(job).split()), job)
        require(len(self.rows(name)) >= epochs, f"{job} ended, {self.state(job)}: {self.log(job)[-2000:]}")

    def saved(self, name: str) -> list[int]:
        """Return the epochs of a run's checkpoints."""
        return sorted(int(file.name[6:]) for file in (self.folder / "runs" / name / "checkpoints").glob("epoch-?????"))


@contextlib.contextmanager
def node() -> Iterator[Node]:
    """Context manager: start munged, slurmctld and slurmd; end them, and the jobs, behind it."""
    folder, host = Path(tempfile.mkdtemp(prefix="slurm")), socket.gethostname().partition(".")[0]
    ports = []
    with contextlib.ExitStack() as probes:
        for _ in range(2):
            probe = probes.enter_context(socket.socket())
            probe.bind(("127.0.0.1", 0))
            ports.append(probe.getsockname()[1])
    (folder / "slurm.conf").write_text(CONFIG.format(host=host, user=getpass.getuser(), folder=folder,
                                                     controller=ports[0], daemon=ports[1],
                                                     first=secrets.randbelow(50_000) + 1))
    (folder / "gres.conf").write_text(f"NodeName={host} Name=gpu File={folder}/gpu[0-7]\n")
    for number in range(8):
        (folder / f"gpu{number}").touch()
    for name in ("spool", "state", "jobs"):
        (folder / name).mkdir()
    key = folder / "munge.key"
    key.touch(0o600)
    key.write_bytes(secrets.token_bytes(128))
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}{os.pathsep}/usr/sbin"
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "FLOWGRPO_"))}
    running = Node(folder / "jobs", kept | {
        "PATH": path, "SLURM_CONF": str(folder / "slurm.conf"), "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))})
    daemons = []
    try:
        for command in (["munged", "--foreground", "--force", f"--socket={folder}/munge.socket", f"--key-file={key}",
                         f"--pid-file={folder}/munge.pid", f"--log-file={folder}/munge.log",
                         f"--seed-file={folder}/munge.seed"],
                        ["slurmctld", "-D"], ["slurmd", "-D", "-N", host]):
            with (folder / f"{command[0]}.out").open("w") as out:
                daemons.append(subprocess.Popen(command, env=running.environment, stdout=out, stderr=out))
            time.sleep(1)
        with contextlib.suppress(Failed):
            until(lambda: "idle" in running.ran("sinfo", "-h", "-o", "%t"), "the node", 60)
        yield running
    finally:
        with contextlib.suppress(Failed):
            running.ran("scancel", "--user", getpass.getuser())
            until(lambda: not running.ran("squeue", "-h"), "the end of all jobs", 60)
        for daemon in reversed(daemons):
            daemon.terminate()
            daemon.wait(30)
        shutil.rmtree(folder, ignore_errors=True)


def until(holds: Callable[[], bool], what: str, longest: float = LONGEST) -> None:
    """Wait until a condition holds. Raises Failed after so many seconds."""
    began = time.monotonic()
    while not holds():
        if time.monotonic() - began > longest:
            raise Failed(f"waited {longest:g} s for {what}")
        time.sleep(0.3)


def require(holds: bool, text: str) -> None:
    if not holds:
        raise Failed(text)


# --- cases -----------------------------------------------------------------------------------------------------------

def stop(node: Node, launcher: str, number: int, *command: str) -> str:
    """Stop a run after a random time in an epoch; return the job's state. Its last whole epoch has to be saved."""
    name = f"stop-{launcher}-{number}"
    job = node.submit(name, epochs=500, FLOWGRPO_LAUNCHER=launcher)
    node.trains(job, name, 1 + number % 2)
    time.sleep(random.Random(number).random() * 2)
    node.ran(*(command or ("scancel",)), job)
    state, rows = node.end(job), node.rows(name)
    require(node.saved(name) == rows[-1:], f"{name}: {rows} done, {node.saved(name)} saved: {node.log(job)[-2000:]}")
    require("Traceback" not in node.log(job), f"{name}: {node.log(job)[-3000:]}")
    print(f"{name}: {state}, epoch {rows[-1]} saved", file=sys.stderr, flush=True)
    shutil.rmtree(node.folder / "runs" / name)
    return state


def stops(node: Node, launcher: str, rounds: int, beside: int) -> str:
    """scancel, so many times, of so many jobs at once."""
    lost: list[str] = []

    def state(number: int) -> str:
        try:
            return stop(node, launcher, number)
        except Failed as error:
            lost.append(str(error))
            return ""

    with ThreadPoolExecutor(beside) as threads:
        states = {*threads.map(state, range(rounds))}
    require(not lost, f"{len(lost)} of {rounds} lose it: {lost[:1]}")
    return f"{rounds} of {rounds} keep the last whole epoch, {' '.join(states)}"


def warning(node: Node, launcher: str) -> str:
    return f"saved, {stop(node, launcher, 99, 'scancel', '--signal=USR1')}"


def limit(node: Node) -> str:
    """The time limit's signal: a minute before the end, and up to a minute earlier."""
    job = node.submit("limit", "--signal", "USR1@60", epochs=5000)
    node.trains(job, "limit", 2)
    hours, minutes = re.findall(r"RunTime=(\d+):(\d+):", node.ran("scontrol", "show", "job", "-o", job))[0]
    node.ran("scontrol", "update", f"JobId={job}", f"TimeLimit={int(hours) * 60 + int(minutes) + 2}")
    state, rows = node.end(job), node.rows("limit")
    require(node.saved("limit") == rows[-1:] and "stopped after epoch" in node.log(job), node.log(job)[-2000:])
    require("Traceback" not in node.log(job), node.log(job)[-2000:])
    return f"saved epoch {rows[-1]}, {state}"


def requeue(node: Node) -> str:
    job = node.submit("requeued", epochs=12)
    node.trains(job, "requeued", 2)
    node.ran("scontrol", "requeue", job)
    until(lambda: node.state(job) == "PENDING" or node.state(job) == "RUNNING", job)
    before = node.saved("requeued")
    with contextlib.suppress(Failed):  # it may have begun again
        node.ran("scontrol", "update", f"JobId={job}", "StartTime=now")
    state, log = node.end(job), node.log(job)
    require(state == "COMPLETED" and node.rows("requeued") == [*range(1, 13)], log[-2000:])
    require(log.count("loading starter") == 2, f"the log of the first part is lost: {log[:500]}")
    return f"went on after epoch {before[-1] if before else 0}, {state}, its log appended"


def array(node: Node) -> str:
    """Three seeds."""
    job = node.submit("seeds", "--array", "0-2", gpus=1)
    state, seeds = node.end(job), []
    for seed in range(3):
        folder = node.folder / "runs" / f"seeds-seed{seed}"
        require((folder / "summary.json").is_file(), node.log(job)[-2000:])
        seeds += re.findall(r"^seed: (\d+)$", (folder / "config.yaml").read_text(), re.M)
    require(state == "COMPLETED" and seeds == ["0", "1", "2"], f"{state}, seeds {seeds}")
    return "seeds-seed0, seeds-seed1, seeds-seed2, each with its summary"


def two_jobs(node: Node, launcher: str) -> str:
    """Two jobs on one node at once."""
    names = [f"beside-{launcher}-{number}" for number in range(2)]
    jobs = [node.submit(name, epochs=4, FLOWGRPO_LAUNCHER=launcher) for name in names]
    states = [node.end(job) for job in jobs]
    require(states == ["COMPLETED"] * 2, "".join(node.log(job)[-1500:] for job in jobs))
    return "both COMPLETED"


def one_gpu(node: Node) -> str:
    job = node.submit("one-gpu", gpus=1)
    state = node.end(job)
    require(state == "COMPLETED" and node.rows("one-gpu") == [1, 2], node.log(job)[-2000:])
    return state


def no_gpu(node: Node) -> str:
    job = node.submit("no-gpu", gpus=0)
    state, said = node.end(job), node.log(job).splitlines()[0]
    require(state == "COMPLETED" and said.startswith("slurm.sh: no GPU"), node.log(job)[-2000:])
    return said


def smaller(node: Node) -> str:
    """A node with fewer GPUs, then fewer CPUs, than asked for: sbatch refuses the job, or squeue has the reason."""
    said = []
    for options, gpus in (([], 16), (["--cpus-per-task", "64"], 2)):
        try:
            job = node.submit("smaller", *options, gpus=gpus)
        except Failed as error:
            said.append(str(error).splitlines()[-1])
        else:
            until(lambda: "None" not in node.ran("squeue", "-h", "-j", job, "-o", "%r"), job)
            said.append(f"{node.state(job)} ({node.ran('squeue', '-h', '-j', job, '-o', '%r').strip()})")
            node.ran("scancel", job)
    require(not node.rows("smaller"), "it ran")
    return " | ".join(said)


def mistake(node: Node, launcher: str) -> str:
    """A wrong option: one line, of all processes."""
    job = node.submit("mistake", "--", "--train.lr=abc", FLOWGRPO_LAUNCHER=launcher)
    return one_line(node, job)


def locked(node: Node) -> str:
    """A second job of the same name, beside the first."""
    first = node.submit("locked", epochs=500)
    node.trains(first, "locked")
    said = one_line(node, node.submit("locked", epochs=500))
    node.ran("scancel", first)
    node.end(first)
    return said


def one_line(node: Node, job: str) -> str:
    """Return the only error in the log of a failed job."""
    state, log = node.end(job), node.log(job)
    [line, *others] = [line for line in log.splitlines() if "error" in line.lower()] or [""]
    ours = [each for each in others if not each.startswith(("srun:", "slurmstepd:"))]
    alone = line.startswith("flowgrpo: error:") and not ours and "Traceback" not in log
    require(state == "FAILED" and alone, log[-3000:])
    return line


def cases(rounds: int, beside: int = 1) -> dict[str, Callable[[Node], str]]:
    """Return all cases by name."""
    both: dict[str, Callable[[Node], str]] = {}
    for launcher in LAUNCHERS:
        both |= {f"scancel, {launcher}": lambda node, by=launcher: stops(node, by, rounds, beside),
                 f"scancel --signal=USR1, {launcher}": lambda node, by=launcher: warning(node, by),
                 f"two jobs on one node, {launcher}": lambda node, by=launcher: two_jobs(node, by),
                 f"wrong option, {launcher}": lambda node, by=launcher: mistake(node, by)}
    return {"one GPU": one_gpu, "no GPU": no_gpu, "a smaller node": smaller, "array of seeds": array,
            "folder of another job": locked, "requeue": requeue, "time limit": limit} | both


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20, help="Stops per launcher.")
    parser.add_argument("--beside", type=int, default=1, help="Of these stops, jobs at once: up to 4.")
    parser.add_argument("--only", default="", help="Part of the names of the cases.")
    options = parser.parse_args()
    failed = 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # ends the daemons
    with node() as running:
        for name, case in cases(options.rounds, options.beside).items():
            if options.only in name:
                began = time.monotonic()
                try:
                    said = case(running)
                except Failed as error:
                    failed, said = failed + 1, f"FAILED: {error}"
                print(f"{name:34} {time.monotonic() - began:6.0f} s  {said}", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
