"""The recipes of examples/pretraining: YAML and flags say the same, and both say what the papers say."""

import os
import re
import shlex
import subprocess
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import pytest
import torch
from fairseq import models, options
from fairseq.data import Dictionary
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.models import MODEL_DATACLASS_REGISTRY
from fairseq.registry import REGISTRIES
from fairseq.tasks import TASK_DATACLASS_REGISTRY, TASK_REGISTRY
from omegaconf import DictConfig, OmegaConf

import amos_fairseq  # noqa: F401  (registers what the recipes name)
from amos_fairseq import composition
from amos_fairseq.errors import UserError

RECIPES = Path(__file__).resolve().parents[2] / "examples" / "pretraining"
# Hydra announces the end of what fairseq calls when it reads flags.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
NAMES = ["amos_tiny", "amos_small", "amos_base", "amos_base_pp", "amos_large"]  # with flags beside the YAML
ALL_NAMES = sorted(path.stem for path in (RECIPES / "config").glob("*.yaml"))
VARIANTS = sorted(f"variants/{path.stem}" for path in (RECIPES / "config" / "variants").glob("*.yaml"))
OF_THE_FAMILY = [name for name in ALL_NAMES if name not in NAMES]


@cache
def compose_recipe(name: str, *overrides: str, config_dir: Path = RECIPES / "config") -> DictConfig:
    """What ``fairseq-hydra-train`` hands to fairseq."""
    return composition.compose_recipe(name, ["task.data=DATA", "checkpoint.save_dir=SAVE_DIR", *overrides], config_dir)


@cache
def recipe_as_flags(name: str) -> DictConfig:
    """The same from NAME.sh: a stand-in for fairseq-train prints its arguments, fairseq's own parser reads them."""
    with TemporaryDirectory() as directory:
        stand_in = Path(directory) / "fairseq-train"
        stand_in.write_text("#!/bin/sh\nprintf '%s\\0' \"$@\"\n")
        stand_in.chmod(0o755)
        command = ["bash", str(RECIPES / f"{name}.sh"), "DATA", "SAVE_DIR"]
        # AMOS_ENVIRONMENT=active would put the real fairseq-train before it.
        path = {**os.environ, "PATH": f"{directory}:{os.environ['PATH']}", "AMOS_ENVIRONMENT": ""}
        arguments = subprocess.run(command, env=path, capture_output=True, text=True, check=True).stdout
    flags = arguments.split("\0")[:-1]
    cfg = convert_namespace_to_omegaconf(options.parse_args_and_arch(options.get_training_parser(), input_args=flags))
    return OmegaConf.create(OmegaConf.to_container(cfg, resolve=True, enum_to_str=True))


def build_on_meta(model_cfg: DictConfig, vocabulary_size: int) -> dict[str, torch.Size]:
    """Names and shapes of the whole model in its real sizes; the meta device holds no numbers."""
    dictionary = Dictionary()
    for number in range(vocabulary_size - len(dictionary) - 1):
        dictionary.add_symbol(f"piece{number}", n=vocabulary_size - number)  # counts: for a unigram generator
    dictionary.add_symbol("<mask>")
    with torch.device("meta"):
        model = models.build_model(model_cfg, SimpleNamespace(source_dictionary=dictionary, masked_share=0.15))
    return {name: parameter.shape for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("name", NAMES)
def test_yaml_and_flags_hold_the_same_values(name: str) -> None:
    from_yaml, from_flags = compose_recipe(name), recipe_as_flags(name)
    groups = [group for group in from_flags if isinstance(from_flags[group], DictConfig) and group != "scoring"]
    assert {"common", "dataset", "optimization", "task", "model", "criterion", "optimizer", "lr_scheduler"} < set(
        groups
    )
    differing = {
        f"{group}.{key}"
        for group in groups
        for key in {*from_yaml[group], *from_flags[group]}
        if from_yaml[group].get(key, "absent") != from_flags[group].get(key, "absent")
    }
    assert differing == {"common.user_dir", "model._name"}
    # The same package, spelled from the checkout and from the script; the same model, named alone and with its size.
    assert from_yaml.common.user_dir == "amos_fairseq"
    assert os.path.samefile(from_flags.common.user_dir, RECIPES.parents[1] / "amos_fairseq")
    assert (from_yaml.model._name, from_flags.model._name) == ("amos", name.removesuffix("_pp"))


# Millions of parameters to keep after pretraining (embeddings and encoder): AMOS Table 1 for base and base++.
@pytest.mark.parametrize(
    ("name", "vocabulary_size", "encoder_millions"),
    [("amos_base", 32768, 110), ("amos_base_pp", 64000, 134), *((name, 4096, None) for name in NAMES)],
)
def test_yaml_and_flags_build_equal_models(name: str, vocabulary_size: int, encoder_millions: int | None) -> None:
    shapes = build_on_meta(compose_recipe(name).model, vocabulary_size)
    assert shapes == build_on_meta(recipe_as_flags(name).model, vocabulary_size)
    if encoder_millions is not None:
        kept = sum(
            shape.numel() for key, shape in shapes.items() if key.startswith(("embed_tokens.", "discriminator."))
        )
        assert abs(kept / 1e6 - encoder_millions) < 1


# AMOS Table 3, and Table 5.1 of the thesis (columns Small and Large; ELECTRA's number of steps), read by eye.
PRINTED = {
    "amos_base": (125_000, 5e-4, 2048, 10_000, 512, 1e-6, (0.9, 0.98), 2.0, 0.1, (12, 768, 3072, 12)),
    "amos_base_pp": (1_950_000, 2e-4, 2048, 10_000, 512, 1e-6, (0.9, 0.98), 2.0, 0.1, (12, 768, 3072, 12)),
    "amos_small": (1_000_000, 5e-4, 128, 10_000, 128, 1e-6, (0.9, 0.999), 2.0, 0.1, (12, 256, 1024, 4)),
    "amos_large": (400_000, 2e-4, 2048, 10_000, 512, 1e-6, (0.9, 0.999), 2.0, 0.1, (24, 1024, 4096, 16)),
    "mlm_small": (1_450_000, 5e-4, 128, 10_000, 128, 1e-6, (0.9, 0.999), 1.0, 0.1, (12, 256, 1024, 4)),
    "mlm_base": (1_000_000, 2e-4, 256, 10_000, 512, 1e-6, (0.9, 0.999), 1.0, 0.1, (12, 768, 3072, 12)),
    "mlm_large": (464_000, 2e-4, 2048, 10_000, 512, 1e-6, (0.9, 0.999), 1.0, 0.1, (24, 1024, 4096, 16)),
    "electra_small": (1_000_000, 5e-4, 128, 10_000, 128, 1e-6, (0.9, 0.999), 1.0, 0.1, (12, 256, 1024, 4)),
    "electra_base": (766_000, 2e-4, 256, 10_000, 512, 1e-6, (0.9, 0.999), 1.0, 0.1, (12, 768, 3072, 12)),
    "electra_large": (400_000, 2e-4, 2048, 10_000, 512, 1e-6, (0.9, 0.999), 1.0, 0.1, (24, 1024, 4096, 16)),
}


@pytest.mark.parametrize("name", PRINTED)
def test_the_numbers_are_those_of_the_papers(name: str) -> None:
    cfg = compose_recipe(name)
    sizes = ("encoder_layers", "encoder_embed_dim", "encoder_ffn_embed_dim", "encoder_attention_heads")
    assert cfg.model.dropout == cfg.model.attention_dropout
    assert (
        cfg.optimization.max_update,
        cfg.optimization.lr[0],
        cfg.dataset.batch_size * cfg.optimization.update_freq[0],
        cfg.lr_scheduler.warmup_updates,
        cfg.task.tokens_per_sample,
        cfg.optimizer.adam_eps,
        tuple(float(beta) for beta in re.findall(r"[\d.]+", cfg.optimizer.adam_betas)),
        cfg.optimization.clip_norm,
        cfg.model.dropout,
        tuple(cfg.model[size] for size in sizes),
    ) == PRINTED[name]
    assert cfg.task.mask_prob == (0.25 if name == "electra_large" else 0.15)
    if cfg.model._name == "amos":  # Appendix B and section 4
        assert (cfg.criterion.discriminator_loss_weight, cfg.model.generator_depths) == (50, "4,6,8")
        assert cfg.model.gumbel_temperature == 0.3
    assert cfg.lr_scheduler.total_num_update == cfg.optimization.max_update


@pytest.mark.parametrize("name", OF_THE_FAMILY)
def test_the_yaml_builds_the_model_of_the_arch(name: str) -> None:
    """``--arch NAME`` and what the YAML spells out have the same parameters."""
    recipe = compose_recipe(name)
    objective = name.partition("_")[0]
    flags = ["DATA", "--arch", name, "--task", "text_pretraining", "--criterion", objective]
    flags += ["--max-positions", str(recipe.model.max_positions)]
    flags += ["--relative-position-scheme", str(recipe.model.relative_position_scheme)]
    parsed = options.parse_args_and_arch(options.get_training_parser(), input_args=flags)
    cfg = OmegaConf.create(OmegaConf.to_container(convert_namespace_to_omegaconf(parsed), enum_to_str=True))
    assert recipe.model._name == recipe.criterion._name == objective
    assert build_on_meta(cfg.model, 4096) == build_on_meta(recipe.model, 4096)


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_is_its_base_but_for_what_it_states(name: str) -> None:
    """Composed through its defaults list it is a whole recipe, which saves to a place of its own."""
    recipe = compose_recipe(name)
    stated = OmegaConf.load(RECIPES / "config" / f"{name}.yaml")
    assert recipe.task._name == "text_pretraining"
    assert recipe.model._name == recipe.criterion._name
    fairseqs_own, base, own = stated.defaults
    assert (fairseqs_own, own) == ("/fairseq/defaults@_global_", "_self_")
    original = compose_recipe(base.lstrip("/"))
    groups = ("task", "model", "criterion", "optimization", "dataset")
    differing = {key for group in groups for key in recipe[group] if recipe[group][key] != original[group].get(key)}
    assert differing, "a variant without a difference"
    for key in differing:  # a setting that two groups share is stated in one
        assert any(OmegaConf.select(stated, f"{group}.{key}") is not None for group in groups), key
    assert build_on_meta(recipe.model, 4096)
    cfg = composition.compose_with_hydra(name, ["task.data=DATA"])
    assert cfg.hydra.run.dir == cfg.checkpoint.save_dir == f"checkpoints/{name.removeprefix('variants/')}"


@pytest.mark.parametrize("name", ALL_NAMES)
def test_every_setting_of_ours_stands_in_the_yaml(name: str) -> None:
    """Hydra overrides only keys that a YAML holds; a field that is shared with another group is set there."""
    recipe = OmegaConf.load(RECIPES / "config" / f"{name}.yaml")
    dataclasses = {
        "task": TASK_DATACLASS_REGISTRY["text_pretraining"],
        "model": MODEL_DATACLASS_REGISTRY[recipe.model._name],
        "criterion": REGISTRIES["criterion"]["dataclass_registry"][recipe.criterion._name],
        "optimizer": REGISTRIES["optimizer"]["dataclass_registry"]["grouped_adam"],
    }
    for group, dataclass in dataclasses.items():
        defaults = OmegaConf.to_container(OmegaConf.structured(dataclass), resolve=False)
        own = {key for key, default in defaults.items() if not str(default).startswith("${")}
        assert own - {"_name"} == set(OmegaConf.to_container(recipe[group])) - {"_name"}, group


def readme_overrides() -> dict[str, str]:
    """Ablation -> override string, from the table of the README."""
    row = r"^\| ([^|]+) \| (?:Fig\. 3, )?T[67] \| `([^`]+)` \|$"
    rows = re.findall(row, (RECIPES / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    return {name.strip(): overrides for name, overrides in rows}


def test_the_readme_lists_every_ablation_of_the_paper() -> None:
    assert set(readme_overrides()) == {
        "w. random layer", "w. layer switch", "w. final mix weights", "- adv. train", "+ adv. MLM", "- stop grad.",
        "w. separate MLM gen.", "w. three 4-layer gen.", "4-layer gen.", "6-layer gen.", "8-layer gen.",
        "12-layer gen.", "On (4,8)", "On (2,4,6,8)", "On all 8",
    }  # fmt: skip


@pytest.mark.parametrize("ablation", readme_overrides())
def test_ablations_of_the_readme_describe_another_model(ablation: str) -> None:
    """The override as a shell would split it, on the smallest recipe that has twelve layers."""
    original, ablated = compose_recipe("amos_small"), compose_recipe("amos_small", *overrides_of(ablation))
    changed = {key for key in original.model if original.model[key] != ablated.model[key]}
    assert changed == {override.removeprefix("model.").split("=")[0] for override in overrides_of(ablation)}
    shapes = build_on_meta(ablated.model, 4096)
    assert ("mixture.v" in shapes) == (ablated.model.mixture == "learned" and "," in ablated.model.generator_depths)
    # Layers of all generators together: of the deepest depth, or of each where they are separate.
    depths = [int(depth) for depth in ablated.model.generator_depths.split(",")]
    layers = {
        key.split(".layers.")[0] + key.split(".layers.")[1].split(".")[0]
        for key in shapes
        if "generators." in key and ".layers." in key
    }
    assert len(layers) == (sum(depths) if ablated.model.separate_generators else max(depths))


def overrides_of(ablation: str) -> list[str]:
    return shlex.split(readme_overrides()[ablation])


def test_an_unknown_key_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="encoder_layrs"):
        compose_recipe("amos_tiny", "model.encoder_layrs=3")
    text = (RECIPES / "config" / "amos_tiny.yaml").read_text()
    (tmp_path / "amos_tiny.yaml").write_text(text.replace("encoder_layers:", "encoder_layrs:"))
    with pytest.raises(UserError, match="encoder_layrs"):
        compose_recipe("amos_tiny", config_dir=tmp_path)


def test_shards_are_named_without_quotes_and_no_data_is_a_clear_mistake() -> None:
    assert compose_recipe("amos_tiny", "task.data=a/shard0:a/shard1").task.data == "a/shard0:a/shard1"
    recipe = compose_recipe("amos_tiny", "task.data='???'")
    with pytest.raises(UserError, match=r"task\.data=DIR"):
        TASK_REGISTRY["text_pretraining"].setup_task(recipe.task)


@pytest.mark.parametrize("name", ALL_NAMES)
def test_a_run_is_continued_and_its_last_checkpoints_are_kept(name: str) -> None:
    """Where the same command finds the run again, and what lies there after a long run."""
    cfg = composition.compose_with_hydra(name, ["task.data=DATA"])
    assert cfg.hydra.run.dir == cfg.checkpoint.save_dir == f"checkpoints/{name}"
    assert cfg.hydra.sweep.dir == cfg.checkpoint.save_dir
    assert cfg.hydra.sweep.subdir == cfg.hydra.job.override_dirname
    assert cfg.hydra.job.chdir is False
    assert cfg.common.tensorboard_logdir == f"checkpoints/{name}/tensorboard"
    assert cfg.checkpoint.keep_interval_updates > 0
    assert cfg.optimization.max_update // cfg.checkpoint.save_interval_updates >= 4
    assert (cfg.checkpoint.best_checkpoint_metric, cfg.checkpoint.maximize_best_checkpoint_metric) == (
        "num_updates",
        True,
    )
