"""``amos recipes``: list the recipes of pretraining with their tokens, FLOPs and predicted hours.

Counting all of them takes minutes, so their costs are in ``flops/recipe_costs.json``. After a change of a recipe, of a model or
of the code that counts, ``python -m amos_fairseq.cli.recipes`` writes that file again.
"""

import argparse
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from amos_fairseq.cli.arguments import DEFAULT_VOCABULARY, add_subcommand, import_fairseq
from amos_fairseq.errors import UserError
from amos_fairseq.files import write_text
from amos_fairseq.recipe_files import PACKAGE, RECIPES, find_recipe, packaged_recipes

# FLOP/s of training, to predict hours. A100, bf16: 40 % of 312 TFLOP/s, the data sheet's peak, as `amos bench --on-paper a100`
# predicts for amos_base; not measured. CPU, float32: electra_small on two cores, 0.144 TFLOP/s, measured with amos bench on
# 2026-11-21; models of width 64 reach less: amos_tiny, 44,000 tokens/s of 1.45 MFLOP in the quickstart.
A100_RATE = 0.4 * 312e12
CPU_RATE, NARROW_CPU_RATE, NARROW = 0.144e12, 0.064e12, 64
SIZES = ("tiny", "mini", "small", "base", "large")
# Dictionary entries that suit a width: 400 and 4,000 pieces, and the special tokens, for the tiny and mini recipes.
VOCABULARY_OF_WIDTH = {64: 405, 128: 4005}  # up to this width
COUNTED = PACKAGE / "flops" / "recipe_costs.json"

DESCRIPTION = f"""\
List the recipes: tokens and FLOPs of all planned updates (matrix products of the forward and backward pass, as counted by
amos flops --reference), and predicted hours of training. Hours are FLOPs divided by a rate: one A100 in bf16,
{A100_RATE / 1e12:.0f} TFLOP/s (40 %% of its peak, not measured); one CPU with two cores in float32, {CPU_RATE / 1e12} TFLOP/s
({NARROW_CPU_RATE / 1e12} for the tiny recipes), both measured. Validation, checkpoints and waiting for data are not included.
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
    counted = counted_costs() if arguments.vocabulary_size is None else {}
    rows = (
        with_hours(counted.get(title) or costs_or_reason(title, *recipe, arguments.vocabulary_size))
        for title, *recipe in found
    )
    if arguments.json:
        print(json.dumps(list(rows), indent=2))
        return
    for line in table(rows, width=max(map(len, names))):
        print(line, flush=True)  # a row that is not in the file takes seconds to count


def recipes_sha256() -> str:
    """Return a hash of the content of all packaged YAML files: a recipe can start from others."""
    contents = [hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(RECIPES.rglob("*.yaml"))]
    return hashlib.sha256("".join(contents).encode()).hexdigest()


def counted_costs() -> dict[str, dict[str, Any]]:
    """Return the costs of the packaged recipes by name, or nothing if a recipe was changed after they were counted."""
    content = json.loads(COUNTED.read_text(encoding="utf-8"))
    if content["recipes_sha256"] != recipes_sha256():
        return {}
    return {row["recipe"]: row for row in content["recipes"]}


def count_all() -> None:
    """Write the costs of all packaged recipes, for :func:`counted_costs`; one recipe in a line."""
    names = [*sorted(packaged_recipes(), key=by_size), *packaged_recipes("variants/*.yaml")]
    rows = ",\n".join(json.dumps(costs_or_reason(name, *find_recipe(name), None)) for name in names)
    write_text(COUNTED, f'{{"recipes_sha256": "{recipes_sha256()}", "recipes": [\n{rows}\n]}}\n')


def by_size(name: str) -> tuple[int, str]:
    """Sort tiny, mini, small, base, large."""
    objective, _, size = name.partition("_")
    return SIZES.index(size.removesuffix("_pp")), objective


def costs_or_reason(title: str, config_dir: Path, name: str, vocabulary_size: int | None) -> dict[str, Any]:
    """Return :func:`recipe_costs`, or why they cannot be counted: some variants need a setting that no paper prints."""
    import_fairseq()
    try:
        return recipe_costs(title, config_dir, name, vocabulary_size)
    except UserError as error:
        return {"recipe": title, "not_counted": str(error)}


def recipe_costs(title: str, config_dir: Path, name: str, vocabulary_size: int | None = None) -> dict[str, Any]:
    """Return the size, tokens and FLOPs of a recipe on one rank.

    Args:
        config_dir, name: see :func:`find_recipe`.
        vocabulary_size: number of dictionary entries; None: one that suits the width.
    """
    from amos_fairseq.composition import compose_recipe
    from amos_fairseq.measure.flops import training_flops

    cfg = compose_recipe(name, ["distributed_training.distributed_world_size=1"], config_dir)
    if vocabulary_size is None:
        suited = (size for width, size in VOCABULARY_OF_WIDTH.items() if cfg.model.encoder_embed_dim <= width)
        vocabulary_size = next(suited, DEFAULT_VOCABULARY)
    cost = training_flops(cfg, vocabulary_size, reference=True)
    return {
        "recipe": title,
        "layers": cfg.model.encoder_layers,
        "width": cfg.model.encoder_embed_dim,
        "length": cfg.task.tokens_per_sample,
        "vocabulary_size": vocabulary_size,
        "max_update": cost.max_update,
        "tokens": cost.tokens_per_update * cost.max_update,
        "flops": cost.total,
    }


def with_hours(row: dict[str, Any]) -> dict[str, Any]:
    """Add the predicted hours to the result of :func:`costs_or_reason`."""
    if "not_counted" in row:
        return row
    seconds = {"a100": row["flops"] / A100_RATE}
    seconds["cpu"] = row["flops"] / (NARROW_CPU_RATE if row["width"] <= NARROW else CPU_RATE)
    return row | {f"predicted_{device}_hours": of_device / 3600 for device, of_device in seconds.items()}


def table(rows: Iterator[dict[str, Any]], width: int) -> Iterator[str]:
    """Yield the lines of the table as the rows arrive; ``width`` is that of the first column."""
    line = f"{{:{width}}}  {{:>9}}  {{:>6}}  {{:>9}}  {{:>7}}  {{:>7}}  {{:>9}}  {{:>9}}"
    yield line.format("", "layers x", "", "", "", "", "one A100,", "one CPU,")
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


if __name__ == "__main__":
    count_all()
