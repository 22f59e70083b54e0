"""``amos train``: start ``fairseq-hydra-train`` with a recipe of the package, or a YAML of any folder."""

import argparse
import os
import sys
from typing import Any

from amos_fairseq.cli.arguments import add_subcommand, number

MINUTES = number(float, 1e-3, 1e7)
DESCRIPTION = """\
Train a recipe: fairseq-hydra-train with the folder and name of the recipe and with this package as common.user_dir, from any
directory. The same command continues the run in checkpoint.save_dir. Several ranks: torchrun --nproc-per-node N --no-python
amos train ... Words that start with a hyphen go to Hydra: --cfg job prints the settings and stops.
"""


def add_parser(subparsers: Any) -> None:
    parser = add_subcommand(subparsers, "train", "pretrain with a recipe", DESCRIPTION, run)
    text = "train for this time, last validation and checkpoint included, instead of max_update; the learning rate follows "
    text += "the time; all parts of a run count (lr_scheduler.minutes)"
    parser.add_argument("--minutes", type=MINUTES, help=text)
    text = (
        "recipe such as amos_base (amos recipes lists them), or the path of a YAML file, which may start from a recipe "
    )
    parser.add_argument("recipe", metavar="RECIPE", help=text + "as variants/electra_unigram.yaml does")
    text = "settings to change, such as task.data=DATA checkpoint.save_dir=RUN optimization.max_update=1000; paths need no "
    text += "quotes for Hydra"
    parser.add_argument("settings", nargs=argparse.REMAINDER, metavar="KEY=VALUE", help=text)


def run(arguments: argparse.Namespace) -> None:
    """Replace this process by ``fairseq-hydra-train``, so that ranks, signals and exit codes are its own.

    It must be the main program: the plugin replaces functions of fairseq's scripts where one of them runs.
    """
    if {"-h", "--help"} & set(arguments.settings):
        arguments.parser.print_help()
        return
    from amos_fairseq.recipes.overrides import training_command  # here: importing Hydra takes a quarter of a second

    # Behind RECIPE, argparse leaves all words to Hydra.
    minutes_parser = argparse.ArgumentParser(prog=arguments.parser.prog, add_help=False, allow_abbrev=False)
    minutes_parser.add_argument("--minutes", type=MINUTES, default=arguments.minutes)
    minutes_args, settings = minutes_parser.parse_known_args(arguments.settings)
    if minutes_args.minutes is not None:
        settings.insert(0, f"lr_scheduler.minutes={minutes_args.minutes!r}")
    command, variables = training_command(arguments.recipe, settings)
    sys.stdout.flush()
    os.execve(sys.executable, command, variables)
