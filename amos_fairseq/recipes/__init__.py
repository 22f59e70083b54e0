"""Find the YAML recipes of pretraining: those of the package by name, others by path."""

import csv
import difflib
import re
from collections.abc import Sequence
from pathlib import Path

from amos_fairseq.errors import UserError
from amos_fairseq.untrusted import read_yaml

RECIPES = Path(__file__).resolve().parent
PACKAGE = RECIPES.parent
COSTS = RECIPES / "costs.tsv"
# Dictionary entries that suit a width: 400 and 4,000 pieces, and the special tokens, for the tiny and mini recipes.
VOCABULARY_OF_WIDTH = {64: 405, 128: 4005}  # up to this width
DEFAULT_VOCABULARY = 32_768  # entries where no data says how many; AMOS, section 4
# Values of task.precision and of --precision; `auto` is bf16 where the device has fast bf16 products, and float32 elsewhere.
PRECISIONS = ("auto", "float32", "bf16", "fp16")

Costs = dict[str, int | str]


def packaged_recipes(pattern: str = "*.yaml") -> list[str]:
    """Return the sorted names of the packaged recipes; those of ``variants/*.yaml`` start with ``variants/``."""
    return sorted(str(path.relative_to(RECIPES).with_suffix("")) for path in RECIPES.glob(pattern))


def find_recipe(source: str) -> tuple[Path, str]:
    """Return what Hydra calls ``--config-dir`` and ``--config-name``, given a recipe's name or the path of a YAML file."""
    path = Path(source)
    if path.suffix not in (".yaml", ".yml"):
        if not (RECIPES / f"{source}.yaml").is_file():
            known = packaged_recipes() + packaged_recipes("variants/*.yaml")
            similar = did_you_mean(difflib.get_close_matches(source, known, cutoff=0.75))
            raise UserError(
                f"there is no recipe {source}: name one that amos recipes lists, or the path of a YAML file{similar}"
            )
        return RECIPES, source
    if path.suffix != ".yaml" or not path.is_file():  # Hydra reads no other ending
        raise UserError(f"{source} is no file *.yaml: give the path of a recipe, or a name that amos recipes lists")
    if path.resolve().is_relative_to(RECIPES):
        path, folder = path.resolve(), RECIPES
    else:
        path = path.absolute()
        # Hydra merges fairseq's defaults into a recipe whose name has no folder: they would replace the values of the recipe
        # that it starts from, unless _self_ is the first entry of its list.
        folder = path.parent if defaults_list(path)[:1] in ([], ["_self_"]) else path.parent.parent
    return folder, str(path.relative_to(folder).with_suffix(""))


def defaults_list(path: Path) -> list[object]:
    """Return the entries of ``defaults`` in a YAML file: the recipes and folders that it is merged with."""
    content = read_yaml(path, "correct the recipe")
    entries = content.get("defaults") if isinstance(content, dict) else None
    return entries if isinstance(entries, list) else []


def packaged_costs() -> dict[str, Costs]:
    """Return size, tokens and FLOPs of the packaged recipes on one rank, from ``costs.tsv``, which ``python
    tests/recipes/write_costs.py`` writes. A recipe for a time, and one with a setting that no paper prints, has a reason,
    ``not_counted``."""
    with COSTS.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    table = {}
    for row in rows:
        name, reason = row.pop("recipe"), row.pop("not_counted")
        table[name] = {"not_counted": reason} if reason else {key: int(number) for key, number in row.items()}
    return table


def did_you_mean(similar: Sequence[str]) -> str:
    """Return "; did you mean A or B?", or an empty string without any similar name."""
    return f"; did you mean {' or '.join(similar)}?" if similar else ""


def search_path(config_dir: Path) -> list[str]:
    """Return the override that lets a recipe of any folder start from a packaged one, as the files in ``variants`` do."""
    return [] if config_dir == RECIPES else [f"hydra.searchpath=[{quoted(f'file://{RECIPES}')}]"]


def quoted(text: str) -> str:
    """Return a string as a value of a Hydra override, where spaces, commas and brackets have a meaning."""
    # A backslash means itself, except before a quotation mark.
    escaped = re.sub(r"(\\*)('|$)", lambda match: match[1] * 2 + match[2].replace("'", "\\'"), text)
    return f"'{escaped}'"
