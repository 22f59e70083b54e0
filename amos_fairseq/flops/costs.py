"""Size, tokens and FLOPs of recipes: a table of the packaged ones (``costs.tsv``), and a count for all others.

``python tests/recipes/write_costs.py`` writes the table, and a test compares it with what is counted.
"""

import csv
from pathlib import Path

from amos_fairseq.errors import UserError
from amos_fairseq.recipes import DEFAULT_VOCABULARY

TABLE = Path(__file__).with_name("costs.tsv")
# Dictionary entries that suit a width: 400 and 4,000 pieces, and the special tokens, for the tiny and mini recipes.
VOCABULARY_OF_WIDTH = {64: 405, 128: 4005}  # up to this width

Costs = dict[str, int | str]


def costs_of_packaged_recipes() -> dict[str, Costs]:
    """Return the table by recipe; a recipe that needs a setting that no paper prints has ``not_counted`` alone, the reason."""
    with TABLE.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    table = {}
    for row in rows:
        name, reason = row.pop("recipe"), row.pop("not_counted")
        table[name] = {"not_counted": reason} if reason else {key: int(number) for key, number in row.items()}
    return table


def count_costs(name: str, config_dir: Path, vocabulary_size: int | None = None) -> Costs:
    """Count a recipe on one rank.

    Args:
        config_dir, name: see :func:`~amos_fairseq.recipes.find_recipe`.
        vocabulary_size: number of dictionary entries; None: one that suits the width.
    """
    from amos_fairseq.flops.configuration import training_flops
    from amos_fairseq.recipes.composition import compose_recipe

    try:
        cfg = compose_recipe(name, ["distributed_training.distributed_world_size=1"], config_dir)
        if vocabulary_size is None:
            suited = (size for width, size in VOCABULARY_OF_WIDTH.items() if cfg.model.encoder_embed_dim <= width)
            vocabulary_size = next(suited, DEFAULT_VOCABULARY)
        cost = training_flops(cfg, vocabulary_size, reference=True)
    except UserError as error:  # some variants need a setting that no paper prints
        return {"not_counted": str(error)}
    return {
        "layers": cfg.model.encoder_layers,
        "width": cfg.model.encoder_embed_dim,
        "length": cfg.task.tokens_per_sample,
        "vocabulary_size": vocabulary_size,
        "max_update": cost.max_update,
        "tokens": cost.tokens_per_update * cost.max_update,
        "flops": cost.total,
    }
