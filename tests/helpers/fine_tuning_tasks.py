"""Tasks of fine-tuning as ``fairseq-train`` sets them up, a small AMOS model for them, and the commands around them."""

import json
import shlex
from pathlib import Path
from typing import Any

from fairseq.data.iterators import EpochBatchIterator
from fairseq.models import BaseFairseqModel
from fairseq.tasks import TASK_DATACLASS_REGISTRY, FairseqTask, setup_task
from forked_command import run_command, run_main
from interrupted_run import assert_same_bits, assert_same_run, checkpoint, killed_at
from omegaconf import OmegaConf

from amos_fairseq.cli.main import main
from amos_fairseq.models.amos import AmosConfig


def set_up(name: str, data: object, **settings: Any) -> FairseqTask:
    """The task of this name on ``data``."""
    values = {"_name": name, "data": str(data), "seed": 3, "save_dir": "unused", "train_subset": "train"}
    values |= {"update_freq": [1]} | settings
    return setup_task(OmegaConf.merge(OmegaConf.structured(TASK_DATACLASS_REGISTRY[name]), values))


def build_amos(task: FairseqTask, **settings: Any) -> BaseFairseqModel:
    values = {"_name": "amos", "encoder_layers": 2, "encoder_embed_dim": 64, "encoder_ffn_embed_dim": 128}
    values |= {"encoder_attention_heads": 2, "max_positions": 64, "generator_depths": "1,2", "max_update": 10}
    return task.build_model(OmegaConf.merge(OmegaConf.structured(AmosConfig), values | settings))


def epoch_batches(
    task: FairseqTask, epoch: int = 1, size: int = 4, position: int = 0, **settings: Any
) -> list[dict[str, Any]]:
    """The batches of ``size`` sequences of an epoch of training; those behind ``position`` of them after a stop there."""

    def iterator() -> EpochBatchIterator:
        settings_of_all = {"max_sentences": size, "max_positions": 64, "epoch": epoch}
        return task.get_batch_iterator(task.datasets["train"], **settings_of_all, **settings)

    stopped, resumed = iterator(), iterator()
    if position:
        batches = stopped.next_epoch_itr()
        for _ in range(position):
            next(batches)
        resumed.load_state_dict(json.loads(json.dumps(stopped.state_dict())))
    return list(resumed.next_epoch_itr())


def epoch_ids(task: FairseqTask, *args: int, **settings: Any) -> list[list[int]]:
    return [batch["id"].tolist() for batch in epoch_batches(task, *args, **settings)]


def write_recipe(place: Path, task: str, **changes: Any) -> None:
    """``place/recipe.yaml``, by which a small model learns synthetic data within seconds; YAML reads JSON."""
    defaults = {"lr": 3e-3, "batch_size": 8, "warmup": 0.1, "dropout": 0, "attention_dropout": 0} | changes
    (place / "recipe.yaml").write_text(json.dumps({"defaults": defaults, "tasks": {task: {}}}), encoding="utf-8")


def fine_tuning_words(command: str, place: Path, out: Path, *flags: object) -> list[str]:
    """``amos COMMAND`` with one seed, on the checkpoint and with the recipe of ``place``."""
    words = [command, "--checkpoint", place / "start", "--recipe", place / "recipe.yaml", "--seeds", 1, "--cpu"]
    return [str(word) for word in (*words, "--out", out, *flags)]


def fine_tune(command: str, place: Path, out: Path, *flags: object) -> str:
    """Run :func:`fine_tuning_words`; what it prints."""
    done = run_main(main, *fine_tuning_words(command, place, out, *flags))
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def train(flags: str, data: object, place: Path, out: Path, *more: object, num_ranks: int = 1) -> Path:
    """``fairseq-train`` from the checkpoint of ``place`` into ``out``, which is returned."""
    words = [data, *shlex.split(flags), "--finetune-from-model", place / "start" / "checkpoint_last.pt"]
    run_command("fairseq_cli.train", [str(word) for word in (*words, "--save-dir", out, *more)], num_ranks)
    return out


def assert_exact_on_ranks_and_after_a_kill(flags: str, data: object, place: Path, folder: Path, *more: object) -> Path:
    """Two ranks have the bits of two micro-batches of one, and so has a run that is killed; return the run of one rank."""
    alone = train(flags, data, place, folder / "alone", *more, "--update-freq", 2)
    ranks = train(flags, data, place, folder / "ranks", *more, num_ranks=2)
    assert_same_bits(checkpoint(ranks)["model"], checkpoint(alone)["model"], "model")
    killed = killed_at(5, alone, folder / "killed")
    train(flags, data, place, killed, *more, "--update-freq", 2)
    assert_same_run(killed, alone)
    return alone
