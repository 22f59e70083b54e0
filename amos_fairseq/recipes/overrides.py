"""``KEY=VALUE`` of the command line: settings that a recipe does not have are refused within a second, before fairseq is
imported, and values become what Hydra reads.

In Hydra's grammar ``#``, ``=``, quotes, brackets, commas, ``~`` and letters beyond ASCII are an error or have a meaning.
"""

import ast
import difflib
import importlib.util
import os
import re
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from amos_fairseq.errors import UserError
from amos_fairseq.process import python_command
from amos_fairseq.recipes import PACKAGE, RECIPES, defaults_list, did_you_mean, find_recipe, quoted, search_path
from amos_fairseq.untrusted import read_yaml

# The groups of fairseq, of which a recipe names one member in _name.
GROUPS = ("bpe", "criterion", "lr_scheduler", "model", "optimizer", "scoring", "task", "tokenizer")
# Others are Hydra's: +KEY, GROUP/NAME, options.
SETTING = re.compile(r"(?P<key>[A-Za-z_][\w.]*)=(?P<value>.*)", re.DOTALL)
# What other trainers call settings of fairseq.
ELSEWHERE = {
    "learning_rate": "lr",
    "max_steps": "max_update",
    "warmup_steps": "warmup_updates",
    "max_grad_norm": "clip_norm",
}


def check_settings(settings: Sequence[str], config_dir: Path, name: str) -> None:
    """Refuse keys that the recipe does not have, a single value in place of a list, and a run without data."""
    known = known_settings(config_dir, name)
    keys = {setting.lstrip("+").partition("=")[0] for setting in settings}
    if known.get("task.data") == "???" and not keys & {"task.data", "--cfg", "-c", "--info", "-i", "task"}:
        raise UserError("task.data is missing: give task.data=DIR, the directory that amos prepare wrote")
    check_keys(settings, known, name)


def check_keys(settings: Sequence[str], known: Mapping[str, Any], name: str) -> None:
    """Refuse ``KEY=VALUE`` with a key that is not ``known``, unless nothing is, and a number for a list; ``name``: of the
    recipe."""
    for match in filter(None, map(SETTING.fullmatch, settings)):
        key, problem = match["key"], ""
        if known and key not in (*known, *GROUPS) and not key.startswith("hydra."):
            problem = f"{name} has no setting {key}{did_you_mean(similar_settings(key, known))}"
        elif isinstance(known.get(key), list) and re.fullmatch(r"[\w.+-]*\d[\w.+-]*", match["value"]):
            problem = f"the value is a list: write {key}=[{match['value']}]"
        if problem:
            raise UserError(f"{match[0]}: {problem}")


def similar_settings(key: str, known: Collection[str]) -> list[str]:
    """Return settings of the same name in other sections; if there are none, of similar names."""
    last = key.rpartition(".")[2]
    last = ELSEWHERE.get(last, last)
    elsewhere = sorted(setting for setting in known if setting.rpartition(".")[2] == last)
    return elsewhere[:3] or difflib.get_close_matches(key, sorted(known), n=3, cutoff=0.75)


def known_settings(config_dir: Path, name: str) -> dict[str, Any]:
    """Return ``section.key`` of all settings of fairseq and of a recipe, with the recipe's values; empty if its files are
    merged in ways of their own."""
    known, waiting = {}, [config_dir / f"{name}.yaml"]
    while waiting:
        path = waiting.pop()
        for entry in defaults_list(path):
            if not isinstance(entry, str):
                return {}
            if entry == "_self_" or entry.startswith("/fairseq/defaults"):
                continue
            folders = [config_dir, RECIPES] if entry.startswith("/") else [path.parent, config_dir, RECIPES]
            files = [folder / f"{entry.partition('@')[0].strip('/')}.yaml" for folder in folders]
            next_path = next(filter(Path.is_file, files), None)
            if next_path is None or next_path == path:
                return {}
            waiting.append(next_path)
        content = read_yaml(path, "correct the recipe")
        for section, values in (content if isinstance(content, dict) else {}).items():
            if isinstance(values, dict):
                file_settings = {f"{section}.{key}": value for key, value in values.items()}
                known = file_settings | known  # the recipe's own come first
    return dict.fromkeys(fairseq_settings()) | known


def fairseq_settings() -> Iterator[str]:
    """Yield ``section.key`` of the sections of fairseq, read from its source."""
    source = Path(importlib.util.find_spec("fairseq").origin).parent / "dataclass" / "configs.py"
    classes = {node.name: node for node in ast.parse(source.read_text()).body if isinstance(node, ast.ClassDef)}

    def fields(name: str) -> Iterator[tuple[str, str]]:
        for node in classes[name].body if name in classes else ():
            if isinstance(node, ast.AnnAssign):
                yield node.target.id, ast.unparse(node.annotation)

    for section, section_class in fields("FairseqConfig"):
        yield from (f"{section}.{key}" for key, _ in fields(section_class))


# Hydra warns of what fairseq does, in the name of these modules, before the plugin is imported: the filters of
# compat/patching.py come too late.
WARNED_BY_HYDRA = ("__main__", "runpy", "sys", "hydra.main")

# Settings whose value is a path, or several separated by colons.
PATHS = (
    "task.data",
    "task.tokenizer_directory",
    "checkpoint.save_dir",
    "checkpoint.restore_file",
    "checkpoint.finetune_from_model",
    "model.generator_checkpoint",
    "lr_scheduler.decay_from",
    "common.tensorboard_logdir",
    "common.log_file",
    "common.user_dir",
    "hydra.run.dir",
)
_OVERRIDE = re.compile(r"(?P<key>[+]{0,2}(?P<name>[A-Za-z_][\w./@]*))=(?P<value>.*)", re.DOTALL)


def training_command(
    recipe: str, settings: Sequence[str], with_parent: bool = False
) -> tuple[list[str], dict[str, str]]:
    """Return the command line of ``fairseq-hydra-train`` for a recipe and ``KEY=VALUE``, and its environment. ``with_parent``
    as in :func:`amos_fairseq.process.python_command`."""
    config_dir, name = find_recipe(recipe)
    check_settings(settings, config_dir, name)
    overrides = search_path(config_dir)
    if not any(setting.startswith("common.user_dir=") for setting in settings):
        overrides.append(f"common.user_dir={quoted(str(PACKAGE))}")
    command = python_command("fairseq_cli.hydra_train", with_parent=with_parent)
    command += ["--config-dir", str(config_dir), "--config-name", name, *overrides, *for_hydra(settings)]
    quiet = ",".join(f"ignore::UserWarning:{module}" for module in WARNED_BY_HYDRA)
    return command, {"PYTHONWARNINGS": quiet} | os.environ  # a user's own value is kept


def for_hydra(settings: Sequence[str]) -> list[str]:
    """Return the words behind RECIPE as Hydra has to get them: texts quoted, unless the user has; in a path ``~`` is expanded,
    which shells do not in ``KEY=~/FOLDER``."""
    return [_override(setting) for setting in settings]


def _override(setting: str) -> str:
    match = _OVERRIDE.fullmatch(setting)
    if match is None:  # an option of Hydra, or its value
        return setting
    key, value, is_path = match["key"], match["value"], match["name"] in PATHS
    if is_path:
        value = ":".join(map(os.path.expanduser, value.split(":")))
    try:
        read = OverridesParser.create().parse_override(f"{key}={value}")
    except HydraException as error:
        if is_path or os.path.exists(value):
            return f"{key}={quoted(value)}"
        reason = str(error).partition("\n")[0]
        text = shlex.quote(f'{key}="{value}"')
        raise UserError(
            f"{setting}: Hydra cannot read the value ({reason}): correct it, or quote a text, as in {text}"
        ) from error
    if not is_path:
        return f"{key}={value}"
    # "a,b" would be a sweep, "[a]" a list, "1e5" a number.
    is_read_as_typed = read.value() in (None, value) or "\\" in value or value[:1] in ("'", '"')
    return f"{key}={value if is_read_as_typed else quoted(value)}"
