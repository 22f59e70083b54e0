"""Tasks of fine-tuning as ``fairseq-train`` sets them up, a small AMOS model for them, and the commands around them."""

import json
from pathlib import Path
from typing import Any

from fairseq.data.iterators import EpochBatchIterator
from fairseq.models import BaseFairseqModel
from fairseq.tasks import TASK_DATACLASS_REGISTRY, FairseqTask, setup_task
from forked_command import run_main
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


def fine_tune(command: str, place: Path, out: Path, *flags: object) -> str:
    """``amos COMMAND`` with one seed, on the checkpoint and with the recipe of ``place``; what it prints."""
    words = ["--checkpoint", place / "start", "--recipe", place / "recipe.yaml", "--seeds", 1, "--cpu", "--out", out]
    done = run_main(main, command, *words, *flags)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
