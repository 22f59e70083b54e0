"""``amos train``: start ``fairseq-hydra-train`` with a recipe of the package, or a YAML of any folder."""

import argparse
import os
import sys
from typing import Any

from amos_fairseq.cli.arguments import add_subcommand

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
    from amos_fairseq.recipes.overrides import (
        training_command,
    )  # here, because Hydra takes a quarter of a second to import

    command, variables = training_command(arguments.recipe, arguments.settings)
    sys.stdout.flush()
    os.execve(sys.executable, command, variables)
