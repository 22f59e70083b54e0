"""Write a checkpoint as a folder that Hugging Face's libraries load: weights, configuration, tokenizer, model card."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from amos_fairseq.checkpoints.read import CheckpointPath, LoadedCheckpoint, load_checkpoint
from amos_fairseq.downstream.results import check_scored
from amos_fairseq.errors import UserError
from amos_fairseq.files import explain_write_errors, whole_folder
from amos_fairseq.hugging_face import custom_code
from amos_fairseq.hugging_face.config import CONFIG_FILE, hugging_face_config
from amos_fairseq.hugging_face.import_folder import WEIGHTS_FILE
from amos_fairseq.hugging_face.model_card import CardSettings, write_card
from amos_fairseq.hugging_face.parts import Part, choose_part, heads_of_tasks
from amos_fairseq.hugging_face.tokenizer import TokenIds, write_tokenizer
from amos_fairseq.hugging_face.verify import is_constant, verify_folder
from amos_fairseq.hugging_face.weights import CUSTOM, Head, in_their_rows, to_hugging_face
from amos_fairseq.output.terminal import say
from amos_fairseq.text.tokenization.tokenizer import BOS, EOS, PAD

ALL_HEADS = "ALL"
_SPECIAL_IDS = {"bos_token_id": BOS, "pad_token_id": PAD, "eos_token_id": EOS}


def export(
    checkpoint: CheckpointPath,
    out: Path,
    tokenizer: CheckpointPath | None = None,
    force: bool = False,
    *,
    part: str | None = None,
    depth: str | None = None,
    family: str | None = None,
    labels: Sequence[str] | None = None,
    card: CardSettings | None = None,
    check: bool = True,
    head: str | None = None,
) -> dict[Path, tuple[Part, str | None]]:
    """Write the folder ``out``, completely or not at all.

    Args:
        checkpoint, tokenizer: see :func:`~amos_fairseq.checkpoints.read.load_checkpoint`.
        out: the folder to write; with ``force`` an existing exported folder is replaced.
        part: encoder, generator, discriminator or mlm; for the default see :func:`.parts.choose_part`.
        depth: of the generator; the default is the deepest.
        family: mpnet, electra, bert or roberta, if several can represent the part.
        labels: names of the classes of a fine-tuned head.
        check: load the folder and compare it with the checkpoint.
        head: name of one of several heads; ALL writes a folder in ``out`` for each.

    Returns:
        what each written folder holds and, with ``check``, how well it agrees.

    Raises:
        UserError: the part does not exist, no class or tokenizer computes the same, ``out`` exists or cannot be written, or
            a folder differs from the checkpoint.
    """
    loaded = load_checkpoint(checkpoint, tokenizer)
    check_scored(loaded.file)
    heads = {"": head}  # folder in ``out`` -> head
    if head == ALL_HEADS:
        heads = {name: name for name in heads_of_tasks(loaded.model)}
        if not heads:
            raise UserError(f"--head {ALL_HEADS}: {checkpoint} is not a model of several tasks: leave it out")
    parts = {name: choose_part(loaded, part, depth, labels, family, head) for name, head in heads.items()}
    check_output_folder(out, force, list(parts))
    explained = explain_write_errors(out, "make room, permit writing, or give another folder")
    with explained, whole_folder(out, force) as folder, without_progress_bars():
        return {
            out / name: (chosen, write_folder(folder / name, (out / name).name, loaded, chosen, card, check))
            for name, chosen in parts.items()
        }


def write_folder(
    folder: Path, name: str, loaded: LoadedCheckpoint, part: Part, card: CardSettings | None, check: bool
) -> str | None:
    """Write all files of one model, which the card calls ``name``, and compare them with the checkpoint."""
    folder.mkdir(exist_ok=True)
    rows = write_tokenizer(folder, loaded, part.family, part.shape.max_positions)
    write_model(folder, part, rows)
    agreement = verify_folder(folder, loaded, part, rows.ids) if check else None
    if is_constant(part, loaded):
        say(
            f"WARNING: the encoder of {loaded.file} gives different texts the same states, so its training has collapsed: "
            "export an earlier checkpoint, or train again",
            "export",
        )
    write_card(folder, name, loaded, part, card or CardSettings(), agreement)
    return agreement


@torch.no_grad()
def write_model(folder: Path, part: Part, rows: TokenIds) -> None:
    """Write ``model.safetensors``, float32, and ``config.json``; for custom positions also their code.

    AutoModel adds a pooling layer to a bare encoder. It gets the identity: ``pooler_output`` is then tanh of the first state,
    not random.
    """
    ids = {name: rows.special_ids.get(symbol) for name, symbol in _SPECIAL_IDS.items()}
    config = hugging_face_config(
        part.family, part.shape, rows.num_rows, **part.settings, **ids, architectures=[part.class_name]
    )
    if part.family == CUSTOM:
        from amos_fairseq.hugging_face.custom_code import modeling_amos as classes

        config.auto_map = custom_code.model_auto_map()
        custom_code.write_code(folder, custom_code.MODEL_CODE)
    else:
        import transformers as classes
    model = getattr(classes, part.class_name)(config)
    state = to_hugging_face(part.family, part.head, in_their_rows(part.weights, rows.ids, rows.num_rows))
    if part.head == Head.NONE and getattr(model, "pooler", None) is not None:
        width = part.shape.width
        state |= {"pooler.dense.weight": torch.eye(width), "pooler.dense.bias": torch.zeros(width)}
    model.load_state_dict(state, strict=True)
    model.eval().save_pretrained(folder, safe_serialization=True)
    # safetensors creates files that only their owner can read; all other files follow the user's umask.
    (folder / WEIGHTS_FILE).chmod((folder / CONFIG_FILE).stat().st_mode)


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """Disable the progress bar that transformers 5 shows for each file of weights."""
    from transformers.utils import logging

    enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            logging.enable_progress_bar()


def check_output_folder(path: Path, replace: bool, holds: Sequence[str] = ("",)) -> None:
    """Refuse a ``path`` that an export must not create or replace.

    With ``replace``, a folder may exist if it is empty, or has a model in each folder of ``holds``; it is removed as a whole.
    """
    if path.name in ("", ".."):
        raise UserError(f"{path} has no name of its own: give the name of a folder to write")
    try:
        str(path).encode()  # safetensors takes names in UTF-8
        if not path.exists():
            return
    except (OSError, UnicodeError) as error:  # a name that is too long, a folder that may not be read
        reason = getattr(error, "strerror", "it is not UTF-8")
        raise UserError(f"{path} cannot be a folder ({reason}): give the name of a folder to write") from error
    if not path.is_dir():
        raise UserError(f"{path} is a file: give the name of a folder")
    if not replace:
        raise UserError(f"{path} exists: give another folder, or --force to replace it")
    if not all((path / name / CONFIG_FILE).is_file() for name in holds) and any(path.iterdir()):
        raise UserError(
            f"{path} holds no exported model ({CONFIG_FILE} is missing in it), and --force replaces nothing else: give "
            "another folder, or remove this one"
        )
