"""A YAML recipe as ``fairseq-hydra-train`` composes it, for those who look at a configuration without training it."""

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

from fairseq.dataclass.initialize import add_defaults, hydra_init
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from amos_fairseq.errors import UserError

RECIPES = Path(__file__).resolve().parents[1] / "examples" / "pretraining" / "config"


def compose_recipe(name: str, overrides: Sequence[str] = (), config_dir: Path = RECIPES) -> DictConfig:
    """The whole configuration, resolved: what fairseq's trainer gets.

    Args:
        name: of a YAML in ``config_dir``, without ``.yaml``; ``variants/NAME`` for one in a folder there.
        overrides: ``model.dropout=0.2`` and the like, as on the command line of ``fairseq-hydra-train``.

    Raises:
        UserError: there is no such recipe, or it or an override holds what fairseq does not know.
    """
    if not (config_dir / f"{name}.yaml").is_file():
        raise UserError(f"{config_dir / name}.yaml is missing: name a recipe such as amos_base, or the path of a YAML")
    try:
        cfg = compose_with_hydra(name, overrides, config_dir, with_hydra_settings=False)
        add_defaults(cfg)
        return OmegaConf.create(OmegaConf.to_container(cfg, resolve=True, enum_to_str=True))
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(f"{config_dir / name}.yaml cannot be composed: {error}") from error


def compose_with_hydra(
    name: str, overrides: Sequence[str] = (), config_dir: Path = RECIPES, with_hydra_settings: bool = True
) -> DictConfig:
    """What Hydra makes of a recipe, before fairseq adds its defaults and before anything is resolved.

    Args:
        name, overrides, config_dir: those of :func:`compose_recipe`.
        with_hydra_settings: keep the group ``hydra`` (directories of the run).

    Raises:
        HydraException, OmegaConfBaseException: it cannot be composed.
    """
    with fairseq_defaults(name), initialize_config_dir(str(config_dir.resolve()), version_base="1.1"):
        return compose(name, overrides=list(overrides), return_hydra_config=with_hydra_settings)


@contextlib.contextmanager
def fairseq_defaults(name: str) -> Iterator[None]:
    """Let Hydra lay fairseq's defaults under the recipe ``name``, and under it alone.

    fairseq stores them for good, for the one recipe of a process; a later one that starts from ``name`` would find them
    there a second time and be refused.
    """
    store = ConfigStore.instance()
    before = dict(store.repo)
    hydra_init(name)
    try:
        with warnings.catch_warnings():
            # On every composition Hydra announces the end of this way of storing them.
            warnings.filterwarnings("ignore", message="(?s).*automatic_schema_matching", category=UserWarning)
            yield
    finally:
        store.repo = before
