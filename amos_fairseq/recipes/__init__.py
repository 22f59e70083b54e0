"""Find the YAML recipes of pretraining: those of the package by name, others by path."""

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from amos_fairseq.errors import UserError

RECIPES = Path(__file__).resolve().parent
PACKAGE = RECIPES.parent
DEFAULT_VOCABULARY = 32_768  # entries where no data says how many; AMOS, section 4
# Values of task.precision and of --precision; `auto` is bf16 where the device supports it in hardware, and float32 elsewhere.
PRECISIONS = ("auto", "float32", "bf16", "fp16")


def packaged_recipes(pattern: str = "*.yaml") -> list[str]:
    """Return the sorted names of the packaged recipes; those of ``variants/*.yaml`` start with ``variants/``."""
    return sorted(str(path.relative_to(RECIPES).with_suffix("")) for path in RECIPES.glob(pattern))


def find_recipe(source: str) -> tuple[Path, str]:
    """Return what Hydra calls ``--config-dir`` and ``--config-name``.

    Args:
        source: a recipe's name such as ``amos_base`` or ``variants/electra_unigram``, or the path of a YAML file.

    Raises:
        UserError: there is no such recipe.
    """
    path = Path(source)
    if path.suffix not in (".yaml", ".yml"):
        if not (RECIPES / f"{source}.yaml").is_file():
            known = packaged_recipes() + packaged_recipes("variants/*.yaml")
            similar = did_you_mean(difflib.get_close_matches(source, known, cutoff=0.75))
            raise UserError(
                f"there is no recipe {source}: name one that amos recipes lists, or the path of a YAML file{similar}"
            )
        return RECIPES, source
    if not path.is_file():
        raise UserError(f"{source} is missing: give the path of a recipe, or a name that amos recipes lists")
    if path.suffix != ".yaml":
        raise UserError(f"{source}: Hydra reads *.yaml only, rename the file")
    if path.resolve().is_relative_to(RECIPES):
        path, folder = path.resolve(), RECIPES
    else:
        path = path.absolute()
        # Hydra merges fairseq's defaults into a recipe whose name has no folder: they would replace the values of the recipe
        # that it starts from, unless _self_ is the first entry of its list.
        folder = path.parent if defaults_list(path)[:1] in ([], ["_self_"]) else path.parent.parent
    return folder, str(path.relative_to(folder).with_suffix(""))


def defaults_list(path: Path) -> list[object]:
    """Return the entries of ``defaults`` in a YAML file: the recipes and folders that it is merged with.

    Raises:
        UserError: the file is not YAML.
    """
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not YAML: {error}") from error
    entries = content.get("defaults") if isinstance(content, dict) else None
    return entries if isinstance(entries, list) else []


def recipe_texts(name: str) -> list[str]:
    """Return the files that make a packaged recipe, in the order in which they are merged: its list of defaults names them."""
    path = RECIPES / f"{name}.yaml"
    if not path.is_file():  # fairseq's own settings are no files
        return []
    parts = [str(entry).lstrip("/").partition("@")[0] for entry in defaults_list(path)] or ["_self_"]
    texts = [[path.read_text(encoding="utf-8")] if part == "_self_" else recipe_texts(part) for part in parts]
    return [text for part in texts for text in part]


def planned_text(name: str) -> int:
    """Return how many tokens of text a packaged recipe reads on one rank: those of all updates, without the ``<s>`` of a block.

    Its files are merged here and not by Hydra, whose start takes seconds.
    """
    settings: dict[str, Any] = {}
    for text in recipe_texts(name):
        for section, values in yaml.safe_load(text).items():
            if isinstance(values, dict):
                settings.setdefault(section, {}).update(values)
    optimization, length = settings["optimization"], settings["task"]["tokens_per_sample"]
    blocks = optimization["max_update"] * optimization["update_freq"][0] * settings["dataset"]["batch_size"]
    return blocks * (length - 1)


def did_you_mean(similar: Sequence[str]) -> str:
    """Return "; did you mean A or B?", or an empty string without any similar name."""
    return f"; did you mean {' or '.join(similar)}?" if similar else ""


def search_path(config_dir: Path) -> list[str]:
    """Return the override that lets a recipe of any folder start from a packaged one, as the files in ``variants`` do."""
    return [] if config_dir == RECIPES else [f"hydra.searchpath=[{quoted(f'file://{RECIPES}')}]"]


def quoted(text: str) -> str:
    """Return a string as a value of a Hydra override, where spaces, commas and brackets have a meaning."""
    return "'{}'".format(text.replace("'", "\\'"))
