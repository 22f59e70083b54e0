"""Tokens, FLOPs and predicted hours of recipes.

Counting one takes a second, so the costs of the packaged recipes are kept in the user's cache folder, under a hash of all files
that they depend on: after a change of a recipe, of a model or of the code that counts, they are counted again.
"""

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from amos_fairseq.errors import UserError
from amos_fairseq.files import cache_folder, write_text
from amos_fairseq.predicted_time import predicted_seconds
from amos_fairseq.process import version_of
from amos_fairseq.recipes import DEFAULT_VOCABULARY, PACKAGE, RECIPES

# Dictionary entries that suit a width: 400 and 4,000 pieces, and the special tokens, for the tiny and mini recipes.
VOCABULARY_OF_WIDTH = {64: 405, 128: 4005}  # up to this width


def costs_of_recipes(
    recipes: Sequence[tuple[str, Path, str]], vocabulary_size: int | None, import_fairseq: Callable[[], None]
) -> Iterator[dict[str, Any]]:
    """Yield size, tokens, FLOPs and predicted hours of each recipe on one rank, as they are counted.

    Args:
        recipes: title, folder and name of each (:func:`find_recipe`).
        vocabulary_size: number of dictionary entries; None: one that suits the width.
        import_fairseq: is called before a recipe is counted.
    """
    cache, key = cache_folder() / "recipe_costs.json", content_hash()
    known = _read(cache, key)
    num_known = len(known)
    try:
        for title, config_dir, name in recipes:
            is_kept = config_dir == RECIPES and vocabulary_size is None
            costs = known.get(name) if is_kept else None
            if costs is None:
                import_fairseq()
                try:
                    costs = count_costs(name, config_dir, vocabulary_size)
                except UserError as error:  # some variants need a setting that no paper prints
                    costs = {"not_counted": str(error)}
            if is_kept:
                known[name] = costs
            yield {"recipe": title, **_with_hours(costs)}
    finally:
        if len(known) > num_known:
            with contextlib.suppress(OSError):  # without a cache they are counted again
                cache.parent.mkdir(parents=True, exist_ok=True)
                write_text(cache, json.dumps({"files": key, "costs": known}))


def content_hash() -> str:
    """Return a hash of all that costs depend on: the files of this package, and the versions of fairseq and PyTorch."""
    paths = sorted(path for pattern in ("*.py", "*.yaml") for path in PACKAGE.rglob(pattern))
    contents = [f"{path.relative_to(PACKAGE)} {hashlib.sha256(path.read_bytes()).hexdigest()}" for path in paths]
    versions = [version_of("fairseq-fixed"), version_of("torch")]
    return hashlib.sha256("\n".join([*contents, *map(str, versions)]).encode()).hexdigest()


def _read(cache: Path, key: str) -> dict[str, dict[str, Any]]:
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        content = json.loads(cache.read_text(encoding="utf-8"))
        if content["files"] == key:
            return dict(content["costs"])
    return {}


def count_costs(name: str, config_dir: Path = RECIPES, vocabulary_size: int | None = None) -> dict[str, Any]:
    """Count a recipe; arguments as in :func:`costs_of_recipes`."""
    from amos_fairseq.measure.flops import training_flops
    from amos_fairseq.recipes.composition import compose_recipe

    cfg = compose_recipe(name, ["distributed_training.distributed_world_size=1"], config_dir)
    if vocabulary_size is None:
        suited = (size for width, size in VOCABULARY_OF_WIDTH.items() if cfg.model.encoder_embed_dim <= width)
        vocabulary_size = next(suited, DEFAULT_VOCABULARY)
    cost = training_flops(cfg, vocabulary_size, reference=True)
    return {
        "layers": cfg.model.encoder_layers,
        "width": cfg.model.encoder_embed_dim,
        "length": cfg.task.tokens_per_sample,
        "vocabulary_size": vocabulary_size,
        "max_update": cost.max_update,
        "tokens": cost.tokens_per_update * cost.max_update,
        "flops": cost.total,
    }


def _with_hours(costs: dict[str, Any]) -> dict[str, Any]:
    if "not_counted" in costs:
        return costs
    seconds = predicted_seconds(costs["flops"], costs["width"])
    return costs | {f"predicted_{device}_hours": of_device / 3600 for device, of_device in seconds.items()}
