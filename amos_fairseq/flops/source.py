"""Where a configuration comes from: a YAML recipe, or the checkpoint of a run."""

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path

from fairseq.dataclass.configs import FairseqConfig
from fairseq.dataclass.initialize import add_defaults
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from amos_fairseq.checkpoints.read import check_architecture, checkpoint_file, read_state
from amos_fairseq.composition import RECIPES, compose_recipe
from amos_fairseq.errors import UserError


def read_configuration(source: str, overrides: Sequence[str] = ()) -> tuple[DictConfig, int | None]:
    """A configuration and, of a checkpoint, the size of its vocabulary.

    Args:
        source: a recipe's name, the path of a YAML, a checkpoint, or the SAVE_DIR of a run.
        overrides: ``model.dropout=0.2`` and the like.

    Raises:
        UserError: there is nothing of that name, it is damaged, or an override names what it does not have.
    """
    path = Path(source)
    if path.suffix in (".yaml", ".yml"):
        return compose_file(path, overrides), None
    if path.suffix == ".pt" or path.is_dir():
        return of_checkpoint(checkpoint_file(path), overrides)
    return compose_recipe(source, overrides=overrides), None


def compose_file(file: Path, overrides: Sequence[str]) -> DictConfig:
    """A YAML anywhere; one of the recipes finds those it starts from, in whichever folder among them it lies."""
    file = file.absolute()
    config_dir = RECIPES if file.is_relative_to(RECIPES) else file.parent
    return compose_recipe(str(file.relative_to(config_dir).with_suffix("")), overrides, config_dir)


def of_checkpoint(file: Path, overrides: Sequence[str]) -> tuple[DictConfig, int]:
    """The settings of a run, with those that this package has got since; the size is that of the token embeddings."""
    state = read_state(file)
    settings = dict(state["cfg"])
    model = settings["model"]
    check_architecture(file, model if isinstance(model, argparse.Namespace) else OmegaConf.create(model))
    if isinstance(model, argparse.Namespace):
        settings["model"] = vars(model)
    if "embed_tokens.weight" not in state["model"]:
        raise UserError(f"{file} holds no token embeddings: give a checkpoint of pretraining as it was saved")
    try:
        cfg = OmegaConf.create(settings)
        add_defaults(cfg)
        add_types(cfg)
        OmegaConf.set_struct(cfg, True)
        cfg.merge_with_dotlist(list(overrides))
    except OmegaConfBaseException as error:
        reason = f"{error.full_key}: {str(error).splitlines()[0]}"
        raise UserError(f"{file}: {reason}; its settings can be changed with --set KEY=VALUE") from error
    return cfg, state["model"]["embed_tokens.weight"].size(0)


def add_types(cfg: DictConfig) -> None:
    """Give fairseq's own groups (optimization, dataset, ...) their types, as :func:`add_defaults` does for the others."""
    for field in dataclasses.fields(FairseqConfig):
        if dataclasses.is_dataclass(field.type) and field.name in cfg:
            schema = OmegaConf.structured(field.type)
            OmegaConf.set_struct(schema, False)  # what another fairseq has saved may stay
            cfg[field.name] = OmegaConf.merge(schema, cfg[field.name])
