"""Electric's recipes: the numbers of the thesis, and variants composed by the command that trains them."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from fairseq import options
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from omegaconf import OmegaConf
from tiny_runs import ROOT, environment

from tests.config.test_configs import compose_recipe

# Thesis Table 5.1, ELECTRA's number of steps; sections 5.2.3 and 5.4.1 (length 128 in small). Layers, width, FFN width,
# heads, embedding, part of a tower, noise, steps, peak rate, batch, length.
PRINTED = {
    "electric_small": (12, 256, 1024, 4, 128, 1 / 4, 0.15, 1_000_000, 5e-4, 128, 128),
    "electric_base": (12, 768, 3072, 12, 768, 1 / 3, 0.15, 766_000, 2e-4, 256, 512),
    "electric_large": (24, 1024, 4096, 16, 1024, 1 / 4, 0.25, 400_000, 2e-4, 2048, 512),
}
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.mark.parametrize("name", PRINTED)
def test_the_numbers_are_those_of_the_thesis(name: str) -> None:
    cfg = compose_recipe(name)
    model, optimization = cfg.model, cfg.optimization
    assert (
        model.encoder_layers,
        model.encoder_embed_dim,
        model.encoder_ffn_embed_dim,
        model.encoder_attention_heads,
        model.embedding_dim or model.encoder_embed_dim,
        pytest.approx(model.generator_size),
        cfg.task.mask_prob,
        optimization.max_update,
        optimization.lr[0],
        cfg.dataset.batch_size * optimization.update_freq[0],
        cfg.task.tokens_per_sample,
    ) == PRINTED[name]
    assert (cfg.lr_scheduler.warmup_updates, cfg.lr_scheduler.power, cfg.optimizer.weight_decay) == (10_000, 1.0, 0.01)
    assert (cfg.optimizer.adam_eps, cfg.model.dropout, cfg.model.attention_dropout) == (1e-6, 0.1, 0.1)
    assert [float(beta) for beta in re.findall(r"[\d.]+", cfg.optimizer.adam_betas)] == [0.9, 0.999]


@pytest.mark.parametrize("share", ["0.15", "0.4"])
def test_the_model_knows_which_share_of_the_tokens_is_noise(share: str) -> None:
    cfg = compose_recipe("electric_tiny", f"task.mask_prob={share}")
    assert cfg.model.mask_prob == cfg.task.mask_prob == float(share)
    assert cfg.criterion.generator_loss_tokens == cfg.model.generator_loss_tokens == "sampled"


def test_a_variant_is_composed_by_the_command_that_trains_it(tmp_path: Path) -> None:
    """In a process of its own: Hydra remembers what other recipes brought along."""
    command = [sys.executable, "-m", "fairseq_cli.hydra_train", "--cfg", "job", "--config-name", "variants/two_tower"]
    command += ["--config-dir", str(ROOT / "examples" / "pretraining" / "config"), "task.data=DATA"]
    shown = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True, check=True).stdout
    cfg = OmegaConf.create(shown)
    assert (cfg.model.electric_variant, cfg.model.generator_size, cfg.model.encoder_layers) == ("two_tower", 1.0, 12)
    assert cfg.dataset.train_subset == "train"  # fairseq's own, which no recipe of ours states
    assert cfg.checkpoint.save_dir == "checkpoints/two_tower"


@pytest.mark.parametrize(("task", "share"), [("text_pretraining", 0.25), ("sentence_prediction", 0.15)])
def test_flags_give_the_model_the_same_share_and_other_tasks_need_none(task: str, share: float) -> None:
    """A checkpoint holds the configuration resolved: a key that only pretraining has must not be missed when fine-tuning."""
    flags = ["DATA", "--arch", "electric_tiny", "--task", task, "--generator-loss-tokens", "all"]
    flags += ["--criterion", "electric", "--mask-prob", "0.25"] if share == 0.25 else ["--criterion", task]
    parsed = options.parse_args_and_arch(options.get_training_parser(), input_args=flags)
    cfg = OmegaConf.to_container(convert_namespace_to_omegaconf(parsed), resolve=True, enum_to_str=True)
    assert (cfg["model"]["mask_prob"], cfg["model"]["generator_size"]) == (share, 0.5)
    if task == "text_pretraining":
        assert cfg["criterion"]["generator_loss_tokens"] == "all"
