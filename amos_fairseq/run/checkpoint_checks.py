"""Refuse a checkpoint that a run cannot continue from: one with damaged parts, and one of another run.

A checkpoint with another vocabulary, relative position scheme, LayerNorm epsilon, window or rotary angle would load if its
shapes happen to match.
"""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from fairseq.logging import meters

from amos_fairseq.checkpoint_files import num_updates_of, read_header, task_state_of, training_seconds_of
from amos_fairseq.errors import UserError
from amos_fairseq.strangers import field, finite_number, whole_number

POSITION_SCHEME = ("relative_position_scheme", "relative_position_buckets", "relative_position_max_distance")
# Windows and rotary angles of ModernBERT, and the epsilon of LayerNorms, which is 1e-12 in most imported models.
OTHERS = ("global_attention_every", "local_attention", "global_rope_theta", "local_rope_theta", "layer_norm_eps")


def check_parts(path: str, header: dict[str, Any], cfg: Any) -> None:
    """Check the parts of a checkpoint that training reads.

    Args:
        cfg: ``checkpoint`` of the configuration; with ``--finetune-from-model`` and ``--reset-*`` fewer parts are read.

    Raises:
        UserError: a part is missing or has another type.
    """
    starts_anew = path == cfg.finetune_from_model
    if not all(torch.is_tensor(tensor) for tensor in _part(header, "model", dict, path).values()):
        raise UserError(f"{path} contains other things than tensors as weights: give another checkpoint")
    extra = _part(header, "extra_state", dict, path)
    num_updates, history = num_updates_of(path, header), header["optimizer_history"]
    if not (starts_anew or cfg.reset_optimizer):
        optimizer = header.get("last_optimizer_state")
        if optimizer is None and num_updates > 0:
            raise UserError(
                f"{path} has no optimizer state, so the run would start its schedule again: give it as --finetune-from-model "
                "with another --save-dir, or as --restore-file with --reset-optimizer --reset-lr-scheduler"
            )
        try:
            if optimizer is not None:
                _check_optimizer(optimizer)
        except ValueError as error:
            raise UserError(f"{path} contains a damaged optimizer state ({error}): give another checkpoint") from error
        for name, kind in (("criterion_name", str), ("optimizer_name", str), ("lr_scheduler_state", dict)):
            _part(history[-1], name, kind, path)
        try:
            _check_score(history[-1]["lr_scheduler_state"].get("best"))
        except ValueError as error:
            raise UserError(f"{path} has a damaged lr_scheduler_state ({error}): give another checkpoint") from error
    position = _part(extra, "train_iterator", dict, path)
    try:
        if "previous_training_time" in extra:
            _named("previous_training_time", training_seconds_of, header)
        if not (starts_anew or cfg.reset_meters):
            _check_score(extra.get("best"))
            for name, saved in field({"metrics": {}} | extra, "metrics", dict).items():
                _named(f"metrics.{name:.100}" if isinstance(name, str) else "metrics", _check_meters, saved)
    except ValueError as error:
        raise UserError(f"{path} has a damaged extra_state ({error}): give another checkpoint") from error
    # fairseq reads these two in any case.
    numbers = {"epoch": position.get("epoch"), "version": position.get("version", 1)}
    if not (starts_anew or cfg.reset_dataloader):
        numbers["iterations_in_epoch"] = position.get("iterations_in_epoch")
        numbers |= {name: value for name, value in position.items() if name.startswith("blocks_")}
    for name, number in numbers.items():
        try:
            whole_number(number, low=int(name == "epoch"))
        except ValueError as error:
            raise UserError(
                f"{path} has no valid position in the data (train_iterator.{name}: {error}): give another checkpoint"
            ) from error


def _named(name: str, check: Callable[..., Any], *arguments: Any) -> None:
    """Call ``check``; put the name of what it checks before the reason of its ``ValueError``."""
    try:
        check(*arguments)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def _check_optimizer(saved: Any) -> None:
    """Raise ``ValueError`` unless this is the state of an optimizer of torch, or of several in fairseq's ``composite``."""
    parts = saved.values() if isinstance(saved, dict) else ()
    composed = [part for part in parts if isinstance(part, dict) and "param_groups" in part]
    for part in composed or [saved]:
        for index, state in field(part, "state", dict).items():
            if not isinstance(state, dict):
                raise ValueError(f"state[{index!r:.100}] is not an object")
        for group in field(part, "param_groups", list):
            field(group, "params", list)
            if isinstance(group.get("lr"), (str, int, float)):  # some optimizers have a tensor or None
                _named("lr", finite_number, group["lr"])


def _check_score(score: Any) -> None:
    if score is not None and type(score) not in (int, float):  # it may be infinite
        raise ValueError("best is not a number")


def _check_meters(saved: Any) -> None:
    """Raise ``ValueError`` unless fairseq can load these meters and read their values."""
    if not isinstance(saved, (list, tuple)):
        raise ValueError("these are no meters")
    try:
        for _, _, kind, state in saved:  # fairseq calls what has this name in its module
            if not issubclass(getattr(meters, kind), meters.Meter):
                raise TypeError(kind)
            for value in state.values():
                if not (value is None or isinstance(value, (int, float)) or torch.is_tensor(value)):
                    raise TypeError(kind)
        loaded = meters.MetersDict()
        loaded.load_state_dict(saved)
        loaded.get_smoothed_values()
    except (TypeError, ValueError, KeyError, AttributeError, AssertionError, ArithmeticError, RuntimeError) as error:
        raise ValueError("these are no meters") from error


def _part(content: dict[str, Any], name: str, kind: type, path: str) -> Any:
    """Return a part of a checkpoint; raise :class:`UserError` unless it has this type."""
    if not isinstance(content.get(name), kind):
        raise UserError(f"{path} is not a checkpoint of fairseq-train: {name} is missing in it, or damaged")
    return content[name]


def check_fits(path: str, task: Any, model_cfg: Any) -> None:
    """Check that a checkpoint has this task's vocabulary, and this model's relative positions and LayerNorm epsilon.

    Only what the checkpoint records is compared; a stock fairseq checkpoint records neither.

    Raises:
        UserError: the checkpoint does not fit.
    """
    header = read_header(path)
    try:
        check_input_dictionary(task_state_of(path, header), task)
        task.load_state_dict(task_state_of(path, header))
    except UserError as error:
        raise UserError(f"{path} does not fit: {error}") from error
    saved = (header.get("cfg") or {}).get("model")
    differences = []
    for name in scheme_settings(saved):
        here, there = getattr(model_cfg, name, None), saved[name]
        if here is not None and str(here) != str(there):
            differences.append(f"--{name.replace('_', '-')} {there}, not {here}")
    if differences:
        raise UserError(f"{path} was trained with {' and '.join(differences)}: give the checkpoint's values")


def check_input_dictionary(task_state: dict[str, Any], task: Any) -> None:
    """Check the dictionary of fairseq's ``sentence_prediction``, which compares none: token 17 could be another word.

    Raises:
        UserError: the dictionary of the inputs is not that of the checkpoint.
    """
    expected = task_state.get("dictionary_sha256")
    dictionary = Path(str(getattr(task.cfg, "data", "")), "input0", "dict.txt")
    if expected is None or not dictionary.is_file():
        return
    if hashlib.sha256(dictionary.read_bytes()).hexdigest() != expected:
        raise UserError(
            f"{dictionary} is not the dictionary that it was trained with (sha256 {expected[:12]}... expected): binarize "
            "the task with SAVE_DIR/tokenizer of that run"
        )


def scheme_settings(model_cfg: Any) -> tuple[str, ...]:
    """Return the names of a checkpoint's settings that do not affect the shapes of its weights.

    They describe relative positions (only the scheme if it is ``none``, which makes the sizes irrelevant), attention and rotary
    positions of ModernBERT, and the epsilon of the LayerNorms.
    """
    if not isinstance(model_cfg, dict) or POSITION_SCHEME[0] not in model_cfg:
        return ()
    scheme = POSITION_SCHEME[:1] if str(model_cfg[POSITION_SCHEME[0]]) == "none" else POSITION_SCHEME
    return (*scheme, *(name for name in OTHERS if name in model_cfg))
