"""The recipes of the package: YAML and flags have the same values, which are those of the papers."""

import os
import re
import subprocess
from argparse import Namespace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import pytest
import torch
from fairseq import models, options
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.models import MODEL_DATACLASS_REGISTRY
from fairseq.registry import REGISTRIES
from fairseq.tasks import TASK_DATACLASS_REGISTRY
from forked_command import run_module
from omegaconf import DictConfig, OmegaConf
from tiny_runs import ROOT

import amos_fairseq  # noqa: F401  (registers the classes that the recipes name)
from amos_fairseq.flops import synthetic_dictionary
from amos_fairseq.recipes import RECIPES, composition

CONFIG = ROOT / "examples" / "pretraining" / "config"  # what users of fairseq name: a link to the recipes
# Hydra warns that a function that fairseq calls is deprecated.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
# With flags beside the YAML: the recipe of the paper, and those whose networks learn at different rates, or at one.
NAMES = ["amos_base", "amos_base_pp", "amos_mini", "amos_modern_mini"]
# Of each objective and encoder, and of each kind of overlay.
KINDS = [f"{objective}_base" for objective in ("amos", "electra", "electric", "mlm", "teams")]
KINDS += [
    "amos_base_pp",
    "electra_small",
    "mlm_modern_mini",
    "electric_modern_large",
    "teams_modern_base",
    "electra_deberta_mini",
]


def compose_recipe(name: str, *overrides: str) -> DictConfig:
    """The configuration that ``fairseq-hydra-train`` passes to fairseq."""
    return composition.compose_recipe(name, ["task.data=DATA", "checkpoint.save_dir=SAVE_DIR", *overrides])


def recipe_as_flags(name: str) -> DictConfig:
    """The same from train.sh: a script in place of fairseq-train prints its arguments."""
    with TemporaryDirectory() as directory:
        script = Path(directory) / "fairseq-train"
        script.write_text("#!/bin/sh\nprintf '%s\\0' \"$@\"\n")
        script.chmod(0o755)
        command = ["bash", str(ROOT / "examples/pretraining/train.sh"), name, "DATA", "SAVE_DIR"]
        # AMOS_ENVIRONMENT=active would put the real fairseq-train before it.
        path = {**os.environ, "PATH": f"{directory}:{os.environ['PATH']}", "AMOS_ENVIRONMENT": ""}
        arguments = subprocess.run(command, env=path, capture_output=True, text=True, check=True).stdout
    return parse_flags(arguments.split("\0")[:-1])


def parse_flags(flags: list[str]) -> DictConfig:
    """The configuration that fairseq's parser makes of the flags of ``fairseq-train``."""
    cfg = convert_namespace_to_omegaconf(options.parse_args_and_arch(options.get_training_parser(), input_args=flags))
    return OmegaConf.create(OmegaConf.to_container(cfg, resolve=True, enum_to_str=True))


def build_on_meta(model_cfg: DictConfig, vocabulary_size: int) -> dict[str, torch.Size]:
    """Names and shapes of the whole model in its real sizes; the meta device holds no values."""
    task = SimpleNamespace(source_dictionary=synthetic_dictionary(vocabulary_size), masked_share=0.15)
    with torch.device("meta"):
        model = models.build_model(model_cfg, task)
    return {name: parameter.shape for name, parameter in model.named_parameters()}


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_yaml_and_flags_hold_the_same_values(name: str) -> None:
    from_yaml, from_flags = compose_recipe(name), recipe_as_flags(name)
    groups = [group for group in from_flags if isinstance(from_flags[group], DictConfig) and group != "scoring"]
    assert {"common", "dataset", "optimization", "task", "model", "criterion", "optimizer"} < set(groups)
    differing = {
        f"{group}.{key}"
        for group in groups
        for key in {*from_yaml[group], *from_flags[group]}
        if from_yaml[group].get(key, "absent") != from_flags[group].get(key, "absent")
    }
    assert differing == {"common.user_dir", "model._name"}
    # The same package, spelled from the checkout and from the script; the same model, named alone and with its size.
    assert from_yaml.common.user_dir == "amos_fairseq"
    assert os.path.samefile(from_flags.common.user_dir, RECIPES.parent)
    assert (from_yaml.model._name, from_flags.model._name) == ("amos", name.removesuffix("_pp"))


@pytest.mark.parametrize(
    ("name", "vocabulary_size", "millions", "rounding"),
    [
        # AMOS Table 1.
        ("amos_base", 32_768, 110, 0.01),
        ("amos_base_pp", 64_000, 134, 0.01),
        # TEAMS Table 1, with BERT's pieces; the paper rounds, and counts BERT's two token types and its pooler.
        ("teams_small", 30_522, 14, 0.04),
        ("teams_base", 30_522, 110, 0.04),
        ("teams_large", 30_522, 335, 0.04),
    ],
)
def test_the_encoder_is_as_large_as_the_paper_says(name, vocabulary_size, millions, rounding) -> None:
    """Embeddings and encoder, without generator and heads."""
    shapes = build_on_meta(compose_recipe(name).model, vocabulary_size)
    encoder = sum(shape.numel() for key, shape in shapes.items() if key.startswith(("embed_tokens.", "discriminator.")))
    assert encoder / 1e6 == pytest.approx(millions, rel=rounding)


# AMOS Table 3; thesis Table 5.1 (columns Small and Large; ELECTRA's number of steps), sections 5.2.3 and 5.4.1; TEAMS Table 5.
# Steps, peak rate, batch, length, beta 2, clip, masked share; layers, width, FFN width, heads, embedding.
PRINTED = {
    "amos_base": (125_000, 5e-4, 2048, 512, 0.98, 2.0, 0.15, (12, 768, 3072, 12, 768)),
    "amos_base_pp": (1_950_000, 2e-4, 2048, 512, 0.98, 2.0, 0.15, (12, 768, 3072, 12, 768)),
    "amos_small": (1_000_000, 5e-4, 128, 128, 0.999, 2.0, 0.15, (12, 256, 1024, 4, 256)),
    "amos_large": (400_000, 2e-4, 2048, 512, 0.999, 2.0, 0.15, (24, 1024, 4096, 16, 1024)),
    "mlm_small": (1_450_000, 5e-4, 128, 128, 0.999, 1.0, 0.15, (12, 256, 1024, 4, 128)),
    "mlm_base": (1_000_000, 2e-4, 256, 512, 0.999, 1.0, 0.15, (12, 768, 3072, 12, 768)),
    "mlm_large": (464_000, 2e-4, 2048, 512, 0.999, 1.0, 0.15, (24, 1024, 4096, 16, 1024)),
    "electra_small": (1_000_000, 5e-4, 128, 128, 0.999, 1.0, 0.15, (12, 256, 1024, 4, 128)),
    "electra_base": (766_000, 2e-4, 256, 512, 0.999, 1.0, 0.15, (12, 768, 3072, 12, 768)),
    "electra_large": (400_000, 2e-4, 2048, 512, 0.999, 1.0, 0.25, (24, 1024, 4096, 16, 1024)),
    "electric_small": (1_000_000, 5e-4, 128, 128, 0.999, 1.0, 0.15, (12, 256, 1024, 4, 128)),
    "electric_base": (766_000, 2e-4, 256, 512, 0.999, 1.0, 0.15, (12, 768, 3072, 12, 768)),
    "electric_large": (400_000, 2e-4, 2048, 512, 0.999, 1.0, 0.25, (24, 1024, 4096, 16, 1024)),
    "teams_small": (500_000, 5e-4, 256, 512, 0.999, 1.0, 0.15, (12, 256, 1024, 4, 128)),
    "teams_base": (1_000_000, 2e-4, 256, 512, 0.999, 1.0, 0.15, (12, 768, 3072, 12, 768)),
    "teams_large": (1_760_000, 2e-4, 2048, 512, 0.999, 1.0, 0.15, (24, 1024, 4096, 16, 1024)),
    "variants/teams_small_pp": (2_000_000, 5e-4, 256, 512, 0.999, 1.0, 0.15, (12, 256, 1024, 4, 128)),
    "variants/teams_only_mlm": (2_000_000, 5e-4, 256, 512, 0.999, 1.0, 0.15, (12, 256, 1024, 4, 128)),
    "variants/teams_base_pp": (1_000_000, 3e-4, 1024, 512, 0.999, 1.0, 0.15, (12, 768, 3072, 12, 768)),
    "variants/electra_large_1750k": (1_750_000, 2e-4, 2048, 512, 0.999, 1.0, 0.25, (24, 1024, 4096, 16, 1024)),
}


@pytest.mark.parametrize("name", PRINTED)
def test_values_are_those_of_the_papers(name: str) -> None:
    cfg = compose_recipe(name)
    model, optimization = cfg.model, cfg.optimization
    betas = [float(beta) for beta in re.findall(r"[\d.]+", cfg.optimizer.adam_betas)]
    sizes = (model.encoder_layers, model.encoder_embed_dim, model.encoder_ffn_embed_dim, model.encoder_attention_heads)
    sizes += (model.embedding_dim or model.encoder_embed_dim,)
    assert (
        optimization.max_update,
        optimization.lr[0],
        cfg.dataset.batch_size * optimization.update_freq[0],
        cfg.task.tokens_per_sample,
        betas[1],
        optimization.clip_norm,
        cfg.task.mask_prob,
        sizes,
    ) == PRINTED[name]
    # The same for all.
    assert (cfg.lr_scheduler.warmup_updates, cfg.lr_scheduler.power, cfg.optimizer.weight_decay) == (10_000, 1.0, 0.01)
    assert (betas[0], cfg.optimizer.adam_eps, model.dropout, model.attention_dropout) == (0.9, 1e-6, 0.1, 0.1)
    assert cfg.lr_scheduler.total_num_update == optimization.max_update
    assert model.max_positions == cfg.task.tokens_per_sample
    # Those of the objective.
    criterion, size = cfg.criterion, name.split("_")[1]
    if model._name == "amos":  # Appendix B and section 4
        assert (criterion.discriminator_loss_weight, model.generator_depths) == (50, "4,6,8")
        assert model.gumbel_temperature == 0.3
    elif model._name in ("electra", "electric"):  # thesis Table 5.1
        assert model.generator_size == pytest.approx({"small": 1 / 4, "base": 1 / 3, "large": 1 / 4}[size])
    elif model._name == "teams":  # Table 5, sections 3.2 and 4.1
        assert (criterion.mlm_loss_weight, model.rtd_loss_weight, model.mws_loss_weight) == (1, 5, 2)
        assert (model.negative_samples, model.negative_sampling, model.share_layers) == (5, "sampled", "half")
        assert model.generator_layers * 2 == model.encoder_layers


@pytest.mark.slow
def test_fairseq_hydra_train_composes_the_same(tmp_path: Path) -> None:
    """In a process of its own: Hydra keeps the defaults of other recipes."""
    name, override = "variants/two_tower", "+sizes=tiny"
    command = ["--cfg", "job", "--config-name", name, "--config-dir", str(CONFIG), "task.data=DATA", override]
    shown = run_module("fairseq_cli.hydra_train", command, tmp_path)
    assert shown.returncode == 0, shown.stderr
    cfg = OmegaConf.create(shown.stdout)
    assert (cfg.model.electric_variant, cfg.model.encoder_layers) == ("two_tower", 6)
    assert cfg.dataset.train_subset == "train"  # fairseq's own, which no recipe of ours states
    own = composition.compose_with_hydra(name, ["task.data=DATA", override], with_hydra_settings=False)
    assert OmegaConf.to_container(cfg) == OmegaConf.to_container(own, enum_to_str=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in KINDS if name not in NAMES])
def test_yaml_builds_the_model_of_the_arch(name: str) -> None:
    """``--arch NAME`` and the YAML build the same parameters."""
    recipe = compose_recipe(name)
    objective = name.partition("_")[0]
    flags = ["DATA", "--arch", name, "--task", "text_pretraining", "--criterion", objective]
    flags += ["--max-positions", str(recipe.model.max_positions)]
    flags += ["--relative-position-scheme", str(recipe.model.relative_position_scheme)]
    cfg = parse_flags(flags)
    assert recipe.model._name == recipe.criterion._name == objective
    assert build_on_meta(cfg.model, 4096) == build_on_meta(recipe.model, 4096)


@pytest.mark.parametrize("objective", ["amos", "electra", "teams"])
@pytest.mark.parametrize(("size", "is_slower"), [("mini", True), ("modern_mini", False)])
def test_arch_and_yaml_train_the_discriminator_with_the_same_rate(objective: str, size: str, is_slower: bool) -> None:
    flags = Namespace()
    models.ARCH_CONFIG_REGISTRY[f"{objective}_{size}"](flags)
    of_arch = getattr(flags, "discriminator_lr_scale", 1.0)
    assert of_arch == compose_recipe(f"{objective}_{size}").model.discriminator_lr_scale
    assert (of_arch < 1) == is_slower


@pytest.mark.parametrize(
    ("time", "minutes", "masked", "warmup", "width", "blocks"),
    [("evening", 240, 0.15, 500 / 16_000, 256, 32), ("day", 1440, 0.3, 0.05, 768, 8192)],
)
def test_the_objectives_have_one_encoder_and_one_schedule_for_a_time(
    time: str, minutes: int, masked: float, warmup: float, width: int, blocks: int
) -> None:
    """The values of docs/pretraining.md. All but the masks of MLM, which are ModernBERT's for a day."""
    recipes = [compose_recipe(f"{objective}_modern_{time}") for objective in ("mlm", "electra", "amos")]
    of_encoder = [
        key for key in recipes[0].model if key.startswith(("encoder", "max_positions", "linear_init", "dropout"))
    ]
    equal = [
        (
            *(recipe[group] for group in ("optimization", "optimizer", "lr_scheduler", "dataset")),
            {key: value for key, value in recipe.task.items() if key not in ("mask_prob", "objective")},
            [recipe.model[key] for key in of_encoder],
        )
        for recipe in recipes
    ]
    assert equal[0] == equal[1] == equal[2]
    assert [recipe.task.mask_prob for recipe in recipes] == [masked, 0.15, 0.15]
    schedule, training = recipes[0].lr_scheduler, recipes[0].optimization
    assert (schedule.minutes, schedule.decay_share, list(training.lr)) == (minutes, 0.2, [1e-3])
    assert schedule.warmup_updates / schedule.total_num_update == warmup
    assert recipes[0].dataset.batch_size * training.update_freq[0] == blocks
    for recipe in recipes:
        assert (recipe.model.encoder_embed_dim, recipe.task.tokens_per_sample) == (width, 128)
        assert build_on_meta(recipe.model, 4096)


# The paper prints no weights (docs/pretraining.md): they are given on the command line.
REQUIRED = {"variants/amos_final_mixture": ["model.fixed_mixture_weights='0.2,0.3,0.5'"]}


@pytest.mark.slow
@pytest.mark.parametrize("name", [f"variants/{path.stem}" for path in sorted(RECIPES.glob("variants/amos_*.yaml"))])
def test_a_variant_differs_from_its_base_only_in_its_own_settings(name: str) -> None:
    """Composed through its defaults list it is a whole recipe. Those of other objectives are built in tests/flops."""
    recipe = compose_recipe(name)
    stated = OmegaConf.load(RECIPES / f"{name}.yaml")
    assert recipe.task._name == "text_pretraining"
    assert recipe.model._name == recipe.criterion._name
    *fairseqs_own, base, own = stated.defaults
    assert own == "_self_"
    assert fairseqs_own == ([] if base.startswith("/variants/") else ["/fairseq/defaults@_global_"])
    original = compose_recipe(base.lstrip("/"))
    groups = ("task", "model", "criterion", "optimization", "dataset")
    differing = {key for group in groups for key in recipe[group] if recipe[group][key] != original[group].get(key)}
    assert differing, "a variant without a difference"
    for key in differing - {"batch_size_valid"}:  # a setting that two groups share is stated in one
        assert any(OmegaConf.select(stated, f"{group}.{key}") is not None for group in groups), key
    check_generators(recipe.model, build_on_meta(compose_recipe(name, *REQUIRED.get(name, [])).model, 4096))


def check_generators(model: DictConfig, shapes: dict[str, torch.Size]) -> None:
    """One generator with the layers of the deepest depth, or separate ones with their own; v only where it is learned."""
    assert ("mixture.v" in shapes) == (model.mixture == "learned" and "," in model.generator_depths)
    depths = [int(depth) for depth in model.generator_depths.split(",")]
    of_attention = [key for key in shapes if key.startswith("generators.") and ".attention." in key]
    layers = {key.partition(".attention.")[0] for key in of_attention}
    assert len(layers) == (sum(depths) if model.separate_generators else max(depths))


@pytest.mark.parametrize("name", KINDS)
def test_every_setting_of_the_plugin_is_in_the_yaml(name: str) -> None:
    """Hydra overrides only keys that a YAML holds; a field that is shared with another group is set there.

    Settings that pretraining refuses are left out.
    """
    recipe = composition.compose_with_hydra(name, with_hydra_settings=False)
    dataclasses = {
        "task": TASK_DATACLASS_REGISTRY["text_pretraining"],
        "model": MODEL_DATACLASS_REGISTRY[recipe.model._name],
        "criterion": REGISTRIES["criterion"]["dataclass_registry"][recipe.criterion._name],
        "optimizer": REGISTRIES["optimizer"]["dataclass_registry"]["grouped_adam"],
    }
    for group, dataclass in dataclasses.items():
        defaults = OmegaConf.to_container(OmegaConf.structured(dataclass), resolve=False)
        own = {key for key, default in defaults.items() if not str(default).startswith("${")} - {
            "pooling",
            "freeze_encoder",
        }
        assert own - {"_name"} == set(recipe[group]) - {"_name"}, group


@pytest.mark.parametrize("name", KINDS[:5])
def test_a_run_is_continued_and_its_last_checkpoints_are_kept(name: str) -> None:
    """The directory of the run, and the checkpoints after a long run."""
    cfg = composition.compose_with_hydra(name, ["task.data=DATA"])
    assert cfg.hydra.run.dir == cfg.checkpoint.save_dir == f"checkpoints/{name}"
    assert cfg.hydra.job.chdir is False
    assert cfg.common.tensorboard_logdir == f"checkpoints/{name}/tensorboard"
    assert cfg.checkpoint.keep_interval_updates > 0
    assert cfg.optimization.max_update // cfg.checkpoint.save_interval_updates >= 4
    assert cfg.checkpoint.best_checkpoint_metric == "num_updates"
    assert cfg.checkpoint.maximize_best_checkpoint_metric is True
