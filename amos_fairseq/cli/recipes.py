"""``amos recipes``: list the recipes of pretraining with their tokens and FLOPs."""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from amos_fairseq.cli.arguments import add_subcommand, import_fairseq
from amos_fairseq.recipes import RECIPES, Costs, find_recipe, packaged_costs, packaged_recipes

SIZES = ("tiny", "mini", "evening", "small", "base", "day", "large")

DESCRIPTION = """\
List the recipes with the tokens and FLOPs of all planned updates: matrix products of the forward and backward pass, as counted
by amos flops --reference, with 32,768 dictionary entries (405 for the tiny recipes, 4,005 for mini). Recipes of your own are
counted, about a second each. A run says after its first updates how long it takes on its machine.
"""


def add_parser(subparsers: Any) -> None:
    add = add_subcommand(subparsers, "recipes", "list the recipes of amos train", DESCRIPTION, run).add_argument
    add("recipes", nargs="*", metavar="RECIPE", help="names or paths of YAML files (default: all recipes but variants)")
    add("--variants", action="store_true", help="list the variants of the papers as well")


def run(arguments: argparse.Namespace) -> None:
    names = list(arguments.recipes) or sorted(
        packaged_recipes(), key=lambda name: SIZES.index(name.removesuffix("_pp").rpartition("_")[2])
    )
    if arguments.variants:
        names += packaged_recipes("variants/*.yaml")
    located = [(name, *find_recipe(name)) for name in names]  # a wrong name is reported before anything is counted
    for line in table(costs_of_recipes(located), width=max(map(len, names))):
        print(line, flush=True)  # a row that has to be counted takes a second


def costs_of_recipes(located: list[tuple[str, Path, str]]) -> Iterator[Costs]:
    """Yield the costs of recipes given by title, folder and name."""
    packaged = packaged_costs()
    for title, config_dir, name in located:
        costs = packaged.get(name) if config_dir == RECIPES else None
        if costs is None:
            import_fairseq()
            from amos_fairseq.flops import count_costs

            costs = count_costs(name, config_dir)
        yield {"recipe": title} | costs


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
