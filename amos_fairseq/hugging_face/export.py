"""Write a checkpoint as a folder that Hugging Face's libraries load: weights, configuration, tokenizer, model card."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import torch

from amos_fairseq.checkpoints.read import CheckpointPath, LoadedCheckpoint, load_checkpoint
from amos_fairseq.downstream.results import check_scored
from amos_fairseq.errors import UserError
from amos_fairseq.files import check_new_folder, explain_write_errors, whole_folder
from amos_fairseq.hugging_face import custom_code
from amos_fairseq.hugging_face.config import CONFIG_FILE, hugging_face_config
from amos_fairseq.hugging_face.import_folder import WEIGHTS_FILE
from amos_fairseq.hugging_face.model_card import CardSettings, write_card
from amos_fairseq.hugging_face.parts import Choice, Part, choose_part, heads_of_tasks, is_constant
from amos_fairseq.hugging_face.sentence_files import write_sentence_classifier, write_sentence_files
from amos_fairseq.hugging_face.tokenizer import TokenIds, write_tokenizer
from amos_fairseq.hugging_face.verify import verify_folder
from amos_fairseq.hugging_face.weights import CUSTOM, Head, in_their_rows, to_hugging_face
from amos_fairseq.output.terminal import say
from amos_fairseq.text.tokenization.fast_tokenizer import FastTokenizer
from amos_fairseq.text.tokenization.tokenizer import BOS, EOS, PAD

ALL_HEADS = "ALL"
_SPECIAL_IDS = {"bos_token_id": BOS, "pad_token_id": PAD, "eos_token_id": EOS}


def export(
    checkpoint: CheckpointPath,
    out: Path,
    tokenizer: CheckpointPath | None = None,
    force: bool = False,
    choice: Choice | None = None,
    card: CardSettings | None = None,
    check: bool = True,
) -> dict[Path, tuple[Part, str | None]]:
    """Write the folder ``out``, completely or not at all.

    Args:
        checkpoint, tokenizer: see :func:`~amos_fairseq.checkpoints.read.load_checkpoint`.
        out: the folder to write; with ``force`` an existing exported folder is replaced.
        check: load the folder and compare it with the checkpoint.

    Returns:
        what each written folder holds and, with ``check``, how well it agrees.

    Raises:
        UserError: the part does not exist, no class or tokenizer computes the same, ``out`` exists or cannot be written, or
            a folder differs from the checkpoint.
    """
    from transformers.utils import logging

    loaded = load_checkpoint(checkpoint, tokenizer)
    check_scored(loaded.file)
    choice, card = choice or Choice(), card or CardSettings()
    choices = {"": choice}  # folder in ``out`` -> what it holds
    if choice.head == ALL_HEADS:
        choices = {name: dataclasses.replace(choice, head=name) for name in heads_of_tasks(loaded.model)}
        if not choices:
            raise UserError(f"--head {ALL_HEADS}: {checkpoint} is not a model of several tasks: leave it out")
    parts = {name: choose_part(loaded, chosen) for name, chosen in choices.items()}
    check_output_folder(out, force, list(parts))
    explained = explain_write_errors(out, "make room, permit writing, or give another folder")
    # transformers 5 shows a bar for each file of weights, and a table of those that a class does not read, such as the pooler.
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    with explained, whole_folder(out, force) as folder:
        return {
            out / name: (chosen, write_folder(folder / name, (out / name).name, loaded, chosen, card, check))
            for name, chosen in parts.items()
        }


def write_folder(
    folder: Path, name: str, loaded: LoadedCheckpoint, part: Part, card: CardSettings, check: bool
) -> str | None:
    """Write all files of one model, which the card calls ``name``, and compare them with the checkpoint."""
    folder.mkdir(exist_ok=True)
    rows = write_tokenizer(folder, loaded, part.family, part.shape.max_positions)
    write_model(folder, part, rows)
    if part.sentence_files is not None:
        write_sentence_files(folder, part.sentence_files)
    if part.head == Head.POOLED_CLASSIFICATION:
        activation = str(loaded.model.cfg.pooler_activation_fn)
        write_sentence_classifier(folder, part.weights, activation, part.shape.max_positions)
    custom_code.write_code(folder, part.family == CUSTOM, not isinstance(loaded.tokenizer, FastTokenizer))
    agreement = verify_folder(folder, loaded, part, rows.ids) if check else None
    if is_constant(part, loaded):
        say(
            f"WARNING: the encoder of {loaded.file} gives different texts the same states, so its training has collapsed: "
            "export an earlier checkpoint, or train again",
            "export",
        )
    write_card(folder, name, loaded, part, card, agreement)
    return agreement


@torch.no_grad()
def write_model(folder: Path, part: Part, rows: TokenIds) -> None:
    """Write ``model.safetensors``, float32, and ``config.json``; for custom positions also their code.

    AutoModel adds a pooling layer to a bare encoder. Unless one was imported, it gets the identity: ``pooler_output`` is then
    tanh of the first state, not random.
    """
    ids = {name: rows.special_ids.get(symbol) for name, symbol in _SPECIAL_IDS.items()}
    config = hugging_face_config(
        part.family, part.shape, rows.num_rows, **part.settings, **ids, architectures=[part.class_name]
    )
    if part.family == CUSTOM:
        from amos_fairseq.hugging_face.custom_code import modeling_amos as classes

        config.auto_map = custom_code.model_auto_map()
    else:
        import transformers as classes
    model = getattr(classes, part.class_name)(config)
    state = to_hugging_face(part.family, part.head, in_their_rows(part.weights, rows.ids, rows.num_rows))
    if not part.head.has_class and getattr(model, "pooler", None) is not None:
        width = part.shape.width
        identity = {"pooler.dense.weight": torch.eye(width), "pooler.dense.bias": torch.zeros(width)}
        state = identity | state
    # A masked language model has no pooler, but AutoModel reads it from the same file.
    known = model.state_dict().keys()
    pooler = {name: tensor for name, tensor in state.items() if ".pooler." in name and name not in known}
    model.load_state_dict({name: tensor for name, tensor in state.items() if name not in pooler}, strict=True)
    model.eval().save_pretrained(folder, safe_serialization=True, state_dict=model.state_dict() | pooler)
    # safetensors creates files that only their owner can read; all other files follow the user's umask.
    (folder / WEIGHTS_FILE).chmod((folder / CONFIG_FILE).stat().st_mode)


def check_output_folder(path: Path, replace: bool, holds: Sequence[str] = ("",)) -> None:
    """Refuse a ``path`` that an export must not create or replace.

    With ``replace``, a folder may exist if it is empty, or has a model in each folder of ``holds``; it is removed as a whole.
    """
    check_new_folder(path, replace)
    if path.exists() and not all((path / name / CONFIG_FILE).is_file() for name in holds) and any(path.iterdir()):
        raise UserError(
            f"{path} holds no exported model ({CONFIG_FILE} is missing in it), and --force replaces nothing else: give "
            "another folder, or remove this one"
        )
