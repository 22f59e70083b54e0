"""Compose a YAML recipe as ``fairseq-hydra-train`` does, to use its configuration without training."""

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

from fairseq.dataclass.initialize import add_defaults, hydra_init
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigNode, ConfigStore
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from amos_fairseq.errors import UserError
from amos_fairseq.recipes import RECIPES, search_path
from amos_fairseq.recipes.overrides import check_keys, known_settings
from amos_fairseq.setting_checks import describe


def compose_recipe(name: str, overrides: Sequence[str] = (), config_dir: Path = RECIPES) -> DictConfig:
    """Return the complete, resolved configuration that fairseq's trainer receives.

    ``name``: of a YAML file in ``config_dir`` without ``.yaml``. ``overrides``: as on the command line of
    ``fairseq-hydra-train``.
    """
    check_keys(overrides, known_settings(config_dir, name), name)
    try:
        cfg = compose_with_hydra(name, overrides, config_dir, with_hydra_settings=False)
        add_defaults(cfg)
        return OmegaConf.create(OmegaConf.to_container(cfg, resolve=True, enum_to_str=True))
    except (HydraException, OmegaConfBaseException) as error:
        cause = error if isinstance(error, OmegaConfBaseException) else error.__context__  # Hydra adds its own words
        reason = describe(cause) if isinstance(cause, OmegaConfBaseException) else str(error)
        raise UserError(f"{config_dir / name}.yaml cannot be composed: {reason}") from error


def compose_with_hydra(
    name: str, overrides: Sequence[str] = (), config_dir: Path = RECIPES, with_hydra_settings: bool = True
) -> DictConfig:
    """Return what Hydra composes, before fairseq adds its defaults and before it is resolved; see ``compose_recipe``."""
    with fairseq_defaults(name), initialize_config_dir(str(config_dir.resolve()), version_base="1.1"):
        return compose(name, [*search_path(config_dir), *overrides], return_hydra_config=with_hydra_settings)


@contextlib.contextmanager
def fairseq_defaults(name: str) -> Iterator[None]:
    """Register fairseq's defaults as the base of the recipe ``name`` for a while. fairseq does so permanently: a later recipe
    that starts from ``name`` would find them twice, which Hydra rejects."""
    store = ConfigStore.instance()
    before = store.repo
    base, groups = registered_defaults()
    store.repo = {**before, **groups, f"{name}.yaml": base}
    try:
        with warnings.catch_warnings():
            # Hydra warns on every composition that this way of storing defaults is deprecated.
            warnings.filterwarnings("ignore", message="(?s).*automatic_schema_matching", category=UserWarning)
            yield
    finally:
        store.repo = before


@cache
def registered_defaults() -> tuple[ConfigNode, dict[str, ConfigNode]]:
    """Return what fairseq's ``hydra_init`` stores: the whole configuration, and each of its groups by its file name."""
    store = ConfigStore.instance()
    before, store.repo = store.repo, {}
    try:
        hydra_init("defaults")
        return store.repo.pop("defaults.yaml"), store.repo
    finally:
        store.repo = before
