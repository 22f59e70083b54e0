"""``amos recipes``: list the recipes of pretraining with their tokens, FLOPs and predicted hours."""

import argparse
import functools
import json
from collections.abc import Iterator
from typing import Any

from amos_fairseq.cli.arguments import add_subcommand, import_fairseq
from amos_fairseq.measure.recipe_costs import VOCABULARY_OF_WIDTH, costs_of_recipes
from amos_fairseq.output.terminal import say
from amos_fairseq.predicted_time import A100_RATE, CPU_RATE, NARROW_CPU_RATES
from amos_fairseq.recipes import DEFAULT_VOCABULARY, find_recipe, packaged_recipes

SIZES = ("tiny", "mini", "small", "base", "large")

DESCRIPTION = f"""\
List the recipes: tokens and FLOPs of all planned updates (matrix products of the forward and backward pass, as counted by
amos flops --reference), and predicted hours of training. Hours are FLOPs divided by a rate: one A100 in bf16,
{A100_RATE / 1e12:.0f} TFLOP/s (34 % of its peak, not measured); one CPU with two cores in float32, {CPU_RATE / 1e12} TFLOP/s
({NARROW_CPU_RATES[64] / 1e12} for the tiny recipes, {NARROW_CPU_RATES[128] / 1e12} for mini), measured.
Validation, checkpoints and waiting for data are not included.
"""


def add_parser(subparsers: Any) -> None:
    parser = add_subcommand(subparsers, "recipes", "list the recipes of amos train", DESCRIPTION)
    parser.add_argument(
        "recipes", nargs="*", metavar="RECIPE", help="names or paths of YAML files (default: all recipes but variants)"
    )
    parser.add_argument("--variants", action="store_true", help="list the variants of the papers as well")
    parser.add_argument(
        "--vocabulary-size",
        type=int,
        metavar="N",
        help="number of dictionary entries, special tokens included "
        f"(default: {DEFAULT_VOCABULARY}; {VOCABULARY_OF_WIDTH[64]} for the tiny recipes, {VOCABULARY_OF_WIDTH[128]} for mini)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    names = arguments.recipes or sorted(packaged_recipes(), key=by_size)
    names += packaged_recipes("variants/*.yaml") if arguments.variants else []
    found = [(name, *find_recipe(name)) for name in names]  # a wrong name is reported before anything is counted
    rows = costs_of_recipes(found, arguments.vocabulary_size, start_counting)
    if arguments.json:
        print(json.dumps(list(rows), indent=2))
        return
    for line in table(rows, width=max(map(len, names))):
        print(line, flush=True)  # a row that has to be counted takes a second


@functools.cache
def start_counting() -> None:
    say("counting operations, about a second a recipe; the next call knows those of the package", "recipes")
    import_fairseq()


def by_size(name: str) -> int:
    """Sort tiny, mini, small, base, large."""
    return SIZES.index(name.removesuffix("_pp").rpartition("_")[2])


def table(rows: Iterator[dict[str, Any]], width: int) -> Iterator[str]:
    """Yield the lines of the table as the rows arrive; ``width`` is that of the first column."""
    line = f"{{:{width}}}  {{:>9}}  {{:>6}}  {{:>9}}  {{:>7}}  {{:>7}}  {{:>9}}  {{:>9}}"
    yield line.format("", "layers x", "", "", "", "", "one A100,", "2 cores,")
    yield line.format("recipe", "width", "length", "updates", "tokens", "FLOPs", "hours", "hours")
    for row in rows:
        if "not_counted" in row:
            yield f"{row['recipe']:{width}}  not counted: {row['not_counted']}"
            continue
        size = f"{row['layers']} x {row['width']}"
        numbers = (f"{row['max_update']:,}", f"{row['tokens']:.2g}", f"{row['flops']:.2g}")
        predicted = (hours(row["predicted_a100_hours"]), hours(row["predicted_cpu_hours"]))
        yield line.format(row["recipe"], size, row["length"], *numbers, *predicted)
    yield "Hours are predicted from the FLOPs, not measured: amos recipes --help."


def hours(number: float) -> str:
    return f"{number:,.2f}" if number < 10 else f"{number:,.0f}"
