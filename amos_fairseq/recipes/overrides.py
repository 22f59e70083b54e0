"""Make ``KEY=VALUE`` of the command line what Hydra reads: paths are quoted, other mistakes are one line.

In Hydra's grammar ``#``, ``=``, quotes, brackets, commas, ``~`` and letters beyond ASCII are an error or have a meaning.
"""

import os
import re
import shlex
from collections.abc import Sequence

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from amos_fairseq.errors import UserError
from amos_fairseq.python_process import python_command
from amos_fairseq.recipes import PACKAGE, find_recipe, quoted, search_path
from amos_fairseq.recipes.known_settings import check_settings

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
    "hydra.sweep.dir",
)
_OVERRIDE = re.compile(r"(?P<key>[+]{0,2}(?P<name>[A-Za-z_][\w./@]*))=(?P<value>.*)", re.DOTALL)


def training_command(
    recipe: str, settings: Sequence[str], with_parent: bool = False
) -> tuple[list[str], dict[str, str]]:
    """Return the command line of ``fairseq-hydra-train`` for a recipe and ``KEY=VALUE``, and its environment.

    ``with_parent`` as in :func:`amos_fairseq.python_process.python_command`.
    """
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
    """Return the words behind RECIPE as Hydra has to get them.

    A value that Hydra reads as it is typed remains, and one that the user has quoted. In a path ``~`` is expanded, which shells
    do not in ``KEY=~/FOLDER``.
    """
    is_sweep = any(setting in ("--multirun", "-m") for setting in settings)
    return [_override(setting, is_sweep) for setting in settings]


def _override(setting: str, is_sweep: bool) -> str:
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
    if not is_path or (is_sweep and read.is_sweep_override() and not os.path.exists(value)):
        return f"{key}={value}"
    # "a,b" would be a sweep, "[a]" a list, "1e5" a number.
    is_read_as_typed = read.value() in (None, value) or "\\" in value or value[:1] in ("'", '"')
    return f"{key}={value if is_read_as_typed else quoted(value)}"
