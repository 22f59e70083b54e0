"""The recipe of a run beside the paper's, with the source of each value."""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from omegaconf import DictConfig, OmegaConf

from amos_fairseq.models.configuration import MODERN, MODERN_ARCH, MODERN_SIZES
from amos_fairseq.recipes import packaged_recipes, recipe_texts
from amos_fairseq.recipes.composition import compose_recipe

SECTIONS = ("task", "model", "criterion", "optimization", "optimizer", "lr_scheduler")
SIZE_OF_WIDTH = {256: "small", 768: "base", 1024: "large"}
MODERN_SIZE_OF_WIDTH = {
    settings["encoder_embed_dim"]: size for size, settings in MODERN_SIZES.items() if size != "mini"
}
# Settings that change where and how fast a run trains, but not what, and settings that belong to fine-tuning.
OF_THE_PROCESS = {
    "_name",
    "data",
    "tokenizer_directory",
    "divergence_factor",
    "collapse_updates",
    "save_interval_minutes",
}
OF_SPEED = {
    *("kernels", "compile", "deterministic", "activation_checkpointing", "precision"),
    *("update_freq", "max_positions", "total_num_update"),
}
OF_FINE_TUNING = {"pooler_dropout", "pooler_activation_fn", "layer_wise_lr_decay"}
WITHOUT_EFFECT = OF_THE_PROCESS | OF_SPEED | OF_FINE_TUNING


class ComparedSetting(NamedTuple):
    """One setting of a run beside the same one of a packaged recipe; ``source`` is the comment of the recipe."""

    name: str
    own: str
    paper: str
    source: str

    @property
    def differs(self) -> bool:
        return self.own != self.paper

    @property
    def is_of_paper(self) -> bool:
        """Whether the source is a paper, and not this package."""
        return bool(re.match(r".*\b(AMOS|TEAMS|thesis)\b", self.source)) and not self.source.startswith("ours")


def paper_recipe(cfg: DictConfig) -> str | None:
    """Return the name of the packaged recipe for the objective, encoder and width of a run; base for other widths.

    That with BERT's encoder for an objective that has none with ModernBERT's.

    None for an objective that has none.
    """
    width, objective, packaged = cfg.model.encoder_embed_dim, cfg.criterion._name, packaged_recipes()
    if cfg.model.get("encoder") == MODERN:
        name = f"{objective}_{MODERN_ARCH}_{MODERN_SIZE_OF_WIDTH.get(width, 'base')}"
        if name in packaged:
            return name
    name = f"{objective}_{SIZE_OF_WIDTH.get(width, 'base')}"
    return name if name in packaged else None


def compare_settings(cfg: DictConfig, name: str, sequences_per_update: int | None) -> list[ComparedSetting]:
    """Compare the settings of a run with the packaged recipe ``name``, in the order of its YAML file."""
    recipe = compose_recipe(name, ["distributed_training.distributed_world_size=1"])
    settings = []
    if sequences_per_update is not None:
        paper = recipe.dataset.batch_size * recipe.optimization.update_freq[0]
        source = batch_source(name)
        settings.append(ComparedSetting("sequences per update", str(sequences_per_update), str(paper), source))
    for key, source in sources(name).items():
        section, _, setting = key.partition(".")
        if section in SECTIONS and setting not in WITHOUT_EFFECT:
            own, paper = (OmegaConf.select(each, key) for each in (cfg, recipe))
            settings.append(ComparedSetting(key, shown(own), shown(paper), source))
    return settings


def sources(name: str) -> dict[str, str]:
    """Return the settings of a packaged recipe with the comments beside them, which name the source; "" without one."""
    found, section = {}, ""
    for line in "\n".join(recipe_texts(name)).splitlines():
        if match := re.match(r"(\w+):", line):
            section = match[1]
        elif match := re.match(r"  (\w+):[^#]*(?:#\s*(.*))?$", line):
            found[f"{section}.{match[1]}"] = match[2] or ""
    return found


def batch_source(name: str) -> str:
    """Return the source of the global batch size, which the recipe has in a comment."""
    found = re.findall(r"Global batch[^(]*\(([^)]*)\)", "\n".join(recipe_texts(name)))
    return found[-1] if found else ""  # a size's own comes after that of base


def shown(value: Any) -> str:
    """Return a setting as text that is equal for equal values: 50 and 50.0, [0.0005] and 5e-4."""
    if OmegaConf.is_config(value):
        value = OmegaConf.to_container(value)
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(map(shown, value))
    if isinstance(value, float):
        return f"{value:g}"
    if value is None or value == "":
        return "none"
    return str(getattr(value, "value", value))
