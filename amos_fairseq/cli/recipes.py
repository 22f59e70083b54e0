"""``amos train``, ``amos recipes``, ``amos flops``: run a recipe of pretraining, list them, count what one costs."""

import argparse
import json
import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from amos_fairseq.cli.arguments import add_configuration, add_subcommand, import_fairseq
from amos_fairseq.errors import UserError
from amos_fairseq.recipes import (
    DEFAULT_VOCABULARY,
    RECIPES,
    VOCABULARY_OF_WIDTH,
    Costs,
    find_recipe,
    packaged_costs,
    packaged_recipes,
)

TRAIN_DESCRIPTION = """\
Train a recipe: fairseq-hydra-train with the folder and name of the recipe and with this package as common.user_dir, from any
directory. The same command continues the run in checkpoint.save_dir. Several ranks: torchrun --nproc-per-node N --no-python
amos train ... Words that start with a hyphen go to Hydra: --multirun starts a sweep, --cfg job prints the settings and stops.
"""


def add_train(subparsers: Any) -> None:
    parser = add_subcommand(subparsers, "train", "pretrain with a recipe", TRAIN_DESCRIPTION, run_train)
    text = "train for this time, last validation and checkpoint included, instead of max_update; the learning rate follows "
    text += "the time; all parts of a run count (lr_scheduler.minutes)"
    parser.add_argument("--minutes", type=float, help=text)
    text = (
        "recipe such as amos_base (amos recipes lists them), or the path of a YAML file, which may start from a recipe "
    )
    parser.add_argument("recipe", metavar="RECIPE", help=text + "as variants/electra_unigram.yaml does")
    text = "settings to change, such as task.data=DATA checkpoint.save_dir=RUN optimization.max_update=1000; paths need no "
    text += "quotes for Hydra"
    parser.add_argument("settings", nargs=argparse.REMAINDER, metavar="KEY=VALUE", help=text)


def run_train(arguments: argparse.Namespace) -> None:
    """Replace this process by ``fairseq-hydra-train``, so that ranks, signals and exit codes are its own.

    It must be the main program: the plugin replaces functions of fairseq's scripts where one of them runs.
    """
    if {"-h", "--help"} & set(arguments.settings):
        arguments.parser.print_help()
        return
    from amos_fairseq.recipes.overrides import training_command  # Hydra takes a quarter of a second to import

    # Behind RECIPE, argparse leaves all words to Hydra.
    of_time = argparse.ArgumentParser(prog=arguments.parser.prog, add_help=False, allow_abbrev=False)
    of_time.add_argument("--minutes", type=float, default=arguments.minutes)
    given, settings = of_time.parse_known_args(arguments.settings)
    if given.minutes is not None:
        if not 0 < given.minutes < math.inf:
            raise UserError(f"--minutes {given.minutes:g} must be above 0")
        settings.append(f"lr_scheduler.minutes={given.minutes!r}")
    command, variables = training_command(arguments.recipe, settings)
    sys.stdout.flush()
    os.execve(sys.executable, command, variables)


SIZES = ("tiny", "mini", "small", "base", "large")

RECIPES_DESCRIPTION = """\
List the recipes with the tokens and FLOPs of all planned updates: matrix products of the forward and backward pass, as counted
by amos flops --reference. Recipes of your own, and those with another vocabulary size, are counted, about a second each. A run
says after its first updates how long it takes on its machine.
"""


def add_recipes(subparsers: Any) -> None:
    parser = add_subcommand(subparsers, "recipes", "list the recipes of amos train", RECIPES_DESCRIPTION, run_recipes)
    add = parser.add_argument
    add("recipes", nargs="*", metavar="RECIPE", help="names or paths of YAML files (default: all recipes but variants)")
    add("--variants", action="store_true", help="list the variants of the papers as well")
    tiny, mini = VOCABULARY_OF_WIDTH[64], VOCABULARY_OF_WIDTH[128]
    text = "number of dictionary entries, special tokens included "
    text += f"(default: {DEFAULT_VOCABULARY}; {tiny} for the tiny recipes, {mini} for mini)"
    add("--vocabulary-size", type=int, metavar="N", help=text)
    add("--json", action="store_true", help="print JSON instead of a table")


def run_recipes(arguments: argparse.Namespace) -> None:
    names = list(arguments.recipes) or sorted(packaged_recipes(), key=by_size)
    if arguments.variants:
        names += packaged_recipes("variants/*.yaml")
    located = [(name, *find_recipe(name)) for name in names]  # a wrong name is reported before anything is counted
    rows = costs_of_recipes(located, arguments.vocabulary_size)
    if arguments.json:
        print(json.dumps(list(rows), indent=2))
        return
    for line in table(rows, width=max(map(len, names))):
        print(line, flush=True)  # a row that has to be counted takes a second


def costs_of_recipes(located: list[tuple[str, Path, str]], vocabulary_size: int | None) -> Iterator[Costs]:
    """Yield the costs of recipes given by title, folder and name."""
    packaged = packaged_costs() if vocabulary_size is None else {}
    for title, config_dir, name in located:
        costs = packaged.get(name) if config_dir == RECIPES else None
        if costs is None:
            import_fairseq()
            from amos_fairseq.flops.configuration import count_costs

            costs = count_costs(name, config_dir, vocabulary_size)
        yield {"recipe": title} | costs


def by_size(name: str) -> int:
    return SIZES.index(name.removesuffix("_pp").rpartition("_")[2])


def table(rows: Iterator[dict[str, Any]], width: int) -> Iterator[str]:
    """Yield the lines of the table as the rows arrive; ``width`` is that of the first column."""
    line = f"{{:{width}}}  {{:>9}}  {{:>6}}  {{:>9}}  {{:>7}}  {{:>7}}"
    yield line.format("", "layers x", "", "", "", "")
    yield line.format("recipe", "width", "length", "updates", "tokens", "FLOPs")
    for row in rows:
        if "not_counted" in row:
            yield f"{row['recipe']:{width}}  not counted: {row['not_counted']}"
            continue
        size = f"{row['layers']} x {row['width']}"
        numbers = (f"{row['max_update']:,}", f"{row['tokens']:.2g}", f"{row['flops']:.2g}")
        yield line.format(row["recipe"], size, row["length"], *numbers)


FLOPS_DESCRIPTION = """\
Count the floating point operations of a configuration on its own model, loss and batch, without data. There are two
conventions. "today": the matrix products of the forward and backward pass as autograd runs them (the backward pass costs twice
the forward pass, less where a gradient is stopped). "thesis" (Clark 2021, section 5.2.2, the FLOPs of ELECTRA's tables): the
backward pass costs as much as the forward pass, embedding lookups are products with one-hot vectors, and element-wise
operations count. Both count what model.kernels runs on a GPU: the output layer computes its logits once for loss and samples,
and again in the backward pass. Inference is the forward pass of the final encoder. Neither convention includes the optimizer's
step. An update consists of the batches of all ranks: one rank per GPU of this machine, unless
distributed_training.distributed_world_size sets another number.
"""


def add_flops(subparsers: Any) -> None:
    parser = add_subcommand(
        subparsers, "flops", "count the FLOPs of training and inference", FLOPS_DESCRIPTION, run_flops
    )
    add_configuration(parser, "optimization.max_update=1000")
    text = "number of input tokens for inference (default: 128, or the maximum of the model if that is less)"
    parser.add_argument("--length", type=int, metavar="T", help=text)
    text = "count the reference implementation (model.kernels=reference), which keeps all logits instead of computing "
    text += "them again, samples from logits of its own, and computes the last layer at every position "
    parser.add_argument("--reference", action="store_true", help=text + "(default: count what model.kernels runs)")
    parser.add_argument("--json", action="store_true", help="print JSON with exact integers instead of tables")


def run_flops(arguments: argparse.Namespace) -> None:
    import_fairseq()
    from amos_fairseq.flops.configuration import read_configuration
    from amos_fairseq.flops.report import print_report, report_flops

    cfg, vocabulary_size = read_configuration(arguments.config, arguments.overrides)
    if arguments.vocabulary_size is not None:
        vocabulary_size = arguments.vocabulary_size
    report = report_flops(cfg, vocabulary_size, arguments.length, arguments.reference)
    if arguments.json:
        print(json.dumps({"config": arguments.config, **report.as_json()}, indent=2))
    else:
        print_report(arguments.config, report)
