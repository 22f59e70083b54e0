"""Launches on several GPUs and nodes: the global batch, the printed commands, and the requeueing of a Slurm job."""

import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tiny_runs import ROOT, run_process, wait_until

from amos_fairseq.errors import REQUEUE
from amos_fairseq.recipes.composition import RECIPES, compose_with_hydra
from amos_fairseq.run.ending import SIGNALS

MULTI_NODE = ROOT / "examples" / "multi_node"


def launch(*flags: str) -> subprocess.CompletedProcess:
    return run_process([sys.executable, MULTI_NODE / "launch.py", "--data", "DATA", *flags])


@pytest.mark.parametrize(
    ("flags", "global_batch", "num_gpus", "per_gpu", "update_freq"),
    [
        (["--nodes", "8", "--rendezvous", "node0:29500"], 2048, 64, 32, 1),
        (["--nodes", "2", "--batch-size", "16", "--launcher", "srun"], 2048, 16, 16, 8),
        (["--gpus-per-node", "4", "--config-name", "amos_small", "--batch-size", "8"], 128, 4, 8, 4),
    ],
)
def test_global_batch_is_constant(flags, global_batch, num_gpus, per_gpu, update_freq) -> None:
    """By hand: update_freq = global batch / (GPUs x batch per GPU). The printed overrides compose with the YAML."""
    data = "a b,c='d'"  # is quoted for Hydra and the shell
    result = launch("--data", data, *flags, "--", "common.seed=2")
    assert result.returncode == 0, result.stderr
    assert result.stderr == f"global batch {global_batch} = {num_gpus} GPUs x {per_gpu} x update_freq {update_freq}\n"
    arguments = shlex.split(result.stdout)
    assert arguments[0] == ("srun" if "srun" in flags else "torchrun")
    start = arguments.index("--config-dir")
    assert arguments[start + 1] == str(RECIPES)
    cfg = compose_with_hydra(arguments[start + 3], arguments[start + 4 :])
    assert cfg.dataset.batch_size * cfg.optimization.update_freq[0] * num_gpus == global_batch
    assert cfg.distributed_training.distributed_world_size == num_gpus
    assert (cfg.task.data, cfg.common.seed, cfg.optimization.update_freq) == (data, 2, [update_freq])


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--gpus-per-node", "6"], "6 GPUs x batch 32 does not divide the global batch of 2048 sequences: use a"),
        (["--nodes", "2"], "several nodes need a common address: give --rendezvous HOST:PORT"),
        (["--config-name", "amos_huge"], "there is no configuration amos_huge: choose one of amos_base, "),
    ],
)
def test_invalid_launches_are_refused(flags: list[str], line: str) -> None:
    result = launch(*flags)
    assert result.returncode == 1
    assert result.stderr.startswith(f"launch.py: error: {line}")
    assert result.stdout == ""


@pytest.fixture
def fake_cluster(tmp_path: Path) -> dict[str, str]:
    """srun and torchrun that write their arguments and exit with the given code; scontrol that writes its arguments."""
    for program in ("srun", "torchrun", "scontrol"):
        path = tmp_path / program
        text = f'env > {tmp_path}/{program}.env\necho "$@" > {tmp_path}/{program}.arguments\n'
        path.write_text(f"#!/bin/sh\n{text}exit ${{{program.upper()}_EXIT:-0}}\n")
        path.chmod(0o755)
    path = os.pathsep.join([str(tmp_path), str(Path(sys.executable).parent), os.environ["PATH"]])
    slurm = {"SUBMIT_DIR": str(ROOT), "JOB_ID": "42", "NNODES": "8", "NTASKS_PER_NODE": "8", "CPUS_PER_TASK": "14"}
    return {**os.environ, "PATH": path} | {f"SLURM_{name}": value for name, value in slurm.items()}


JOB = ["bash", str(MULTI_NODE / "slurm.sbatch"), "amos_base", "DATA"]


@pytest.mark.parametrize(("status", "requeued"), [(REQUEUE, True), (1, False)])
def test_job_is_requeued_only_on_our_exit_code(fake_cluster, tmp_path, status, requeued) -> None:
    result = run_process([*JOB, "common.seed=2"], env=fake_cluster | {"SRUN_EXIT": str(status)})
    assert result.returncode == status
    arguments = (tmp_path / "srun.arguments").read_text()
    assert arguments.startswith("--nodes 8 --ntasks 64 --ntasks-per-node 8 --cpus-per-task 14 ")
    assert arguments.endswith("distributed_training.distributed_port=29500 common.seed=2\n")
    assert (tmp_path / "scontrol.arguments").exists() == requeued
    if requeued:
        assert (tmp_path / "scontrol.arguments").read_text() == "requeue 42\n"


@pytest.mark.slow
def test_a_cancelled_job_is_not_requeued(fake_cluster, tmp_path) -> None:
    """scancel sends SIGTERM to the batch script and to the ranks, which then exit with our code."""
    wait = f"while [ ! -e {tmp_path}/end ]; do sleep 0.05; done"
    (tmp_path / "srun").write_text(
        f"#!/bin/sh\ntouch {tmp_path}/started\n{wait}\ntouch {tmp_path}/ended\nexit {REQUEUE}\n"
    )
    job = subprocess.Popen(JOB, env=fake_cluster, start_new_session=True)
    wait_until(lambda: (tmp_path / "started").exists() or job.poll() is not None)
    assert job.poll() is None
    job.terminate()
    (tmp_path / "end").touch()
    assert job.wait(120) != REQUEUE
    wait_until((tmp_path / "ended").exists)
    time.sleep(0.5)  # what still runs would have asked for the queue by now
    assert not (tmp_path / "scontrol.arguments").exists()


def test_torchrun_script_starts_every_node(fake_cluster, tmp_path) -> None:
    command = ["bash", MULTI_NODE / "torchrun.sh", "amos_large", "DATA"]
    env = fake_cluster | {"FIRST_NODE": "node0", "NODES": "2", "GPUS_PER_NODE": "4", "TORCHRUN_EXIT": "3"}
    result = run_process(command, env=env)
    assert result.returncode == 3, result.stderr
    arguments = (tmp_path / "torchrun.arguments").read_text()
    assert "--nnodes 2 --nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint node0:29500" in arguments
    assert "optimization.update_freq=[16]" in arguments
    variables = dict(line.split("=", 1) for line in (tmp_path / "torchrun.env").read_text().splitlines() if "=" in line)
    assert {number.name for number in SIGNALS} < set(variables["PET_SIGNALS_TO_HANDLE"].split(","))
    assert int(variables["PET_SHUTDOWN_TIMEOUT"]) == 300
