"""Which parts a TEAMS model consists of, from its settings (Shen et al., 2021, sections 3.2 and 4.3)."""

from typing import TYPE_CHECKING

from amos_fairseq.models.configuration import encoder_shape
from amos_fairseq.modules.encoder import EncoderShape

if TYPE_CHECKING:
    from amos_fairseq.models.teams import TeamsConfig


def tasks(cfg: "TeamsConfig") -> tuple[str, ...]:
    """The discriminator's tasks, "mws" and "rtd": those whose loss has a weight."""
    weights = {"mws": cfg.mws_loss_weight, "rtd": cfg.rtd_loss_weight}
    return tuple(task for task, weight in weights.items() if weight)


def kept_shape(cfg: "TeamsConfig") -> EncoderShape:
    """The shape of either branch from the embeddings to its last layer: with heads on top of all L layers it has L + 1."""
    return encoder_shape(cfg, cfg.encoder_layers + (str(cfg.task_heads) == "extra_layer"))


def generator_layers(cfg: "TeamsConfig") -> int:
    """The generator's depth; half of the encoder's where nothing is said (Table 5)."""
    return cfg.generator_layers or cfg.encoder_layers // 2


def num_shared_layers(cfg: "TeamsConfig") -> int:
    """Layers of the generator that are the encoder's own, counted from the bottom; half is rounded down (Table 4)."""
    depth = generator_layers(cfg)
    return {"none": 0, "half": depth // 2, "all": depth}[str(cfg.share_layers)]


def check_settings(cfg: "TeamsConfig", num_words: int) -> None:
    """Raise ValueError for numbers out of range, and for a setting that another one makes meaningless.

    Args:
        cfg: the settings.
        num_words: rows of the vocabulary that a generator may propose.
    """
    _check_tasks(cfg)
    _check_layers(cfg)
    # The original is no negative.
    if not 1 <= cfg.negative_samples < num_words:
        raise ValueError(
            f"--negative-samples {cfg.negative_samples} must be at least 1 and below the {num_words} words of the vocabulary"
        )


def _check_tasks(cfg: "TeamsConfig") -> None:
    for task in ("mws", "rtd"):
        weight = getattr(cfg, f"{task}_loss_weight")
        if not weight >= 0:
            raise ValueError(f"--{task}-loss-weight {weight} must not be negative; 0 leaves the task out")
    present, kept, heads = tasks(cfg), str(cfg.representation), str(cfg.task_heads)
    if not present:
        raise ValueError(
            "--mws-loss-weight 0 --rtd-loss-weight 0 leaves the discriminator without a task: give one of them a weight, or "
            "train a masked language model (--arch mlm_base --criterion mlm)"
        )
    if kept not in present:
        raise ValueError(
            f"--representation {kept} names the branch that --{kept}-loss-weight 0 leaves out: give --representation "
            f"{present[0]}"
        )
    if len(present) == 1 and heads != "attention":
        raise ValueError(f"--task-heads {heads} has no meaning with a single task: leave it out")
    if heads == "ffn" and kept == "rtd":
        raise ValueError(
            "--representation rtd has no meaning with --task-heads ffn, which stand on one encoder: leave it out"
        )


def _check_layers(cfg: "TeamsConfig") -> None:
    depth, shared = generator_layers(cfg), num_shared_layers(cfg)
    if depth < 1:
        raise ValueError(
            f"--generator-layers {cfg.generator_layers} gives a generator of {depth} layers beside an encoder of "
            f"{cfg.encoder_layers}: give a number above 0"
        )
    if str(cfg.share_layers) == "half" and shared == 0:
        raise ValueError(
            "--share-layers half shares nothing with a generator of one layer: give --generator-layers 2 or more, or "
            "--share-layers none or all"
        )
    if shared > cfg.encoder_layers:
        raise ValueError(
            f"--share-layers {cfg.share_layers} would share {shared} layers of the generator with an encoder of "
            f"{cfg.encoder_layers}: give fewer --generator-layers"
        )
    if len(tasks(cfg)) == 2 and str(cfg.task_heads) == "attention" and cfg.encoder_layers < 2:
        raise ValueError(
            "--task-heads attention needs --encoder-layers 2 or more: both branches stand on the layer below the last"
        )
