#!/usr/bin/env python3
"""Print the command that trains a recipe of amos_fairseq/recipes on several GPUs or nodes with the batch of the paper.

    python examples/multi_node/launch.py --config-name amos_base --data DATA --nodes 8 --gpus-per-node 8

With --execute it replaces this process. Global batch = GPUs x batch per GPU x update_freq: the YAML states
it for one GPU, and update_freq is chosen to preserve it. Arguments after ``--`` are further Hydra overrides.
"""

import argparse
import os
import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from omegaconf import OmegaConf

CHECKOUT = Path(__file__).resolve().parents[2]
RECIPES = CHECKOUT / "amos_fairseq" / "recipes"
# Runs fairseq's script without importing modules of the current folder, as `-m` would.
PROGRAM = [str(CHECKOUT / "amos_fairseq" / "process.py"), "fairseq_cli.hydra_train"]
PORT = 29500


class LaunchError(Exception):
    """An error and how to fix it, in one line."""


@dataclass(frozen=True)
class Batch:
    """The parts of a global batch: ``num_gpus * per_gpu * update_freq`` sequences in an update."""

    num_gpus: int
    per_gpu: int
    update_freq: int

    @classmethod
    def keeping(cls, global_batch: int, num_gpus: int, per_gpu: int) -> "Batch":
        """Choose the update_freq that preserves ``global_batch``; raise :class:`LaunchError` if there is none."""
        if min(global_batch, num_gpus, per_gpu) < 1:
            raise LaunchError("nodes, GPUs and batch sizes must be at least 1")
        update_freq, rest = divmod(global_batch, num_gpus * per_gpu)
        if update_freq == 0 or rest:
            fitting = [size for size in range(1, per_gpu + 1) if global_batch % (num_gpus * size) == 0]
            hint = f"give --batch-size {fitting[-1]}" if fitting else "use a number of GPUs that divides it"
            raise LaunchError(
                f"{num_gpus} GPUs x batch {per_gpu} does not divide the global batch of {global_batch} sequences: {hint}"
            )
        return cls(num_gpus, per_gpu, update_freq)


def batch_of(config_name: str) -> tuple[int, int]:
    """Return (global batch, batch per GPU) in sequences, as a YAML states them for one GPU."""
    names = sorted(path.stem for path in RECIPES.glob("*.yaml"))
    if config_name not in names:
        raise LaunchError(f"there is no configuration {config_name}: choose one of {', '.join(names)}")
    # The other sizes start from base and change it in sizes/: see the list of files in their YAML.
    listed = OmegaConf.load(RECIPES / f"{config_name}.yaml").get("defaults", [config_name])
    parts = [part for part in listed if part != "_self_"]
    config = OmegaConf.merge(*(OmegaConf.load(RECIPES / f"{part}.yaml") for part in parts))
    return config.dataset.batch_size * config.optimization.update_freq[0], config.dataset.batch_size


def hydra_value(path: str) -> str:
    """Return a path as a value of a Hydra override, where blanks, commas and most other characters have a meaning."""
    is_plain = re.fullmatch(r"[\w./:-]+", path, re.ASCII)
    return path if is_plain else "'{}'".format(path.replace("'", "\\'"))


def training_command(launcher: str, args: argparse.Namespace, batch: Batch) -> list[str]:
    """Return the command to run on every node (torchrun) or once in a Slurm job (srun)."""
    hydra = ["--config-dir", str(RECIPES), "--config-name", args.config_name, f"task.data={hydra_value(args.data)}"]
    hydra += [f"dataset.batch_size={batch.per_gpu}", f"optimization.update_freq=[{batch.update_freq}]"]
    hydra += [f"distributed_training.distributed_world_size={batch.num_gpus}"]
    if launcher == "torchrun":
        rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", args.rendezvous, "--rdzv-id", args.job]
        start = ["torchrun", "--nnodes", str(args.nodes), "--nproc-per-node", str(args.gpus_per_node), *rendezvous]
        return [*start, *PROGRAM, *hydra, *args.overrides]
    start = ["srun", "--nodes", str(args.nodes), "--ntasks", str(batch.num_gpus)]
    start += ["--ntasks-per-node", str(args.gpus_per_node)]
    # Since Slurm 22.05 srun does not read the job's --cpus-per-task: without it every rank would get one core.
    start += ["--cpus-per-task", str(args.cpus_per_task)]
    start.append("--wait=120")  # ends ranks that hang because another one died, not those that are exiting
    hydra.append(f"distributed_training.distributed_port={PORT}")
    return [*start, "python", *PROGRAM, *hydra, *args.overrides]


def parse_arguments(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False, description=__doc__.split("\n\n")[0])
    parser.add_argument("--config-name", default="amos_base", help="a YAML of amos_fairseq/recipes (%(default)s)")
    parser.add_argument("--data", required=True, help="binarized corpus, visible to every node")
    parser.add_argument("--nodes", type=int, default=1, help="(%(default)s)")
    parser.add_argument("--gpus-per-node", type=int, default=8, help="(%(default)s)")
    parser.add_argument("--batch-size", type=int, help="sequences per GPU and micro-batch (default: the YAML's)")
    parser.add_argument("--cpus-per-task", type=int, default=6, help="srun: CPU cores of a rank (%(default)s)")
    parser.add_argument("--launcher", choices=("torchrun", "srun"), default="torchrun", help="(%(default)s)")
    parser.add_argument(
        "--rendezvous", default=f"localhost:{PORT}", help="torchrun: first node's HOST:PORT (%(default)s)"
    )
    parser.add_argument("--job", default="amos", help="torchrun: run name, the same on all nodes (%(default)s)")
    parser.add_argument(
        "--execute", action="store_true", help="run the command; without it the command is only printed"
    )
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="further Hydra overrides, after --")
    return parser.parse_args(words)


def main(words: list[str]) -> None:
    args = parse_arguments(words)
    try:
        global_batch, per_gpu = batch_of(args.config_name)
        batch = Batch.keeping(global_batch, args.nodes * args.gpus_per_node, args.batch_size or per_gpu)
        if args.launcher == "torchrun" and args.nodes > 1 and args.rendezvous.startswith("localhost"):
            raise LaunchError("several nodes need a common address: give --rendezvous HOST:PORT, the same on all")
    except LaunchError as error:
        print(f"launch.py: error: {error}", file=sys.stderr)
        sys.exit(1)
    command = training_command(args.launcher, args, batch)
    factors = f"{batch.num_gpus} GPUs x {batch.per_gpu} x update_freq {batch.update_freq}"
    print(f"global batch {global_batch} = {factors}", file=sys.stderr)
    print(shlex.join(command), flush=True)
    if args.execute:
        os.execvp(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
