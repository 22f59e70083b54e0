"""``amos train``: start ``fairseq-hydra-train`` with a recipe of the package, or a YAML of any folder."""

import argparse
import os
import sys
from typing import Any

from amos_fairseq.cli.arguments import add_subcommand
from amos_fairseq.errors import UserError
from amos_fairseq.python_process import python_command
from amos_fairseq.recipes import PACKAGE, find_recipe, quoted, search_path

# Hydra warns of what fairseq does, in the name of these modules, before the plugin is imported: the filters of
# compat/process.py come too late.
WARNED_BY_HYDRA = ("__main__", "runpy", "sys", "hydra.main")

# The groups of fairseq, whose import would take seconds.
GROUPS = ("bpe", "criterion", "lr_scheduler", "model", "optimizer", "scoring", "task", "tokenizer")

DESCRIPTION = """\
Train a recipe: fairseq-hydra-train with the folder and name of the recipe and with this package as common.user_dir, from any
directory. The same command continues the run in checkpoint.save_dir. Several ranks: torchrun --nproc-per-node N --no-python
amos train ... Words that start with a hyphen go to Hydra: --multirun starts a sweep, --cfg job prints the settings and stops.
"""


def add_parser(subparsers: Any) -> None:
    parser = add_subcommand(subparsers, "train", "pretrain with a recipe", DESCRIPTION)
    text = (
        "recipe such as amos_base (amos recipes lists them), or the path of a YAML file, which may start from a recipe "
    )
    parser.add_argument("recipe", metavar="RECIPE", help=text + "as variants/electra_unigram.yaml does")
    text = "settings to change, such as task.data=DATA checkpoint.save_dir=RUN optimization.max_update=1000; paths need no "
    text += "quotes for Hydra"
    parser.add_argument("settings", nargs=argparse.REMAINDER, metavar="KEY=VALUE", help=text)
    parser.set_defaults(run=lambda arguments: run(arguments, parser))


def run(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Replace this process by ``fairseq-hydra-train``, so that ranks, signals and exit codes are its own.

    It must be the main program: the plugin replaces functions of fairseq's scripts where one of them runs.
    """
    if {"-h", "--help"} & set(arguments.settings):
        parser.print_help()
        return
    for setting in arguments.settings:
        _check_group(setting)
    config_dir, name = find_recipe(arguments.recipe)
    overrides = search_path(config_dir)
    if not any(setting.startswith("common.user_dir=") for setting in arguments.settings):
        overrides.append(f"common.user_dir={quoted(str(PACKAGE))}")
    from amos_fairseq.recipes.overrides import for_hydra  # here, because Hydra takes a quarter of a second to import

    settings = for_hydra(arguments.settings)
    command = [*python_command("fairseq_cli.hydra_train"), "--config-dir", str(config_dir), "--config-name", name]
    quiet = ",".join(f"ignore::UserWarning:{name}" for name in WARNED_BY_HYDRA)
    variables = {"PYTHONWARNINGS": quiet} | os.environ  # a user's own value is kept
    sys.stdout.flush()
    os.execve(sys.executable, [*command, *overrides, *settings], variables)


def _check_group(setting: str) -> None:
    """Refuse a number, true, false or null in place of a group, with which Hydra would end with a traceback."""
    key, _, value = setting.lstrip("+").partition("=")
    if key in GROUPS and (value.lower() in ("true", "false", "null") or _is_number(value)):
        raise UserError(f"{setting}: {key} is a group of settings: name one of them, as in {key}._name=VALUE")


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
