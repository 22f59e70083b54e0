"""Write a checkpoint as a folder that Hugging Face's libraries load: weights, configuration, tokenizer, model card."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from amos_fairseq.checkpoints.read import LoadedCheckpoint
from amos_fairseq.checkpoints.write import NEVER_PREDICTED
from amos_fairseq.errors import UserError
from amos_fairseq.files import os_error_behind, whole_folder
from amos_fairseq.hugging_face import custom_code
from amos_fairseq.hugging_face.config import CONFIG_FILE, CUSTOM, WEIGHTS_FILE, families_of, hugging_face_config
from amos_fairseq.hugging_face.export_tokenizer import FolderTokenizer, folder_tokenizer
from amos_fairseq.hugging_face.model_card import CardSettings, Target, check_card_settings, write_card
from amos_fairseq.hugging_face.parts import Part, choose_part
from amos_fairseq.hugging_face.verify import Agreement, verify_folder
from amos_fairseq.hugging_face.weights import ENCODER, FAMILIES, MASKED_LM, to_hugging_face, to_hugging_face_rows
from amos_fairseq.strangers import is_unicode
from amos_fairseq.tokenization.fast_tokenizer import ABSENT
from amos_fairseq.tokenization.tokenizer import BOS, EOS, PAD

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


class Exported(NamedTuple):
    """The result of :func:`export`."""

    class_name: str
    description: str
    has_code: bool
    labels: list[str]  # of the classes, in their order
    agreement: Agreement | None  # None if nothing was compared


def export(
    loaded: LoadedCheckpoint,
    out: Path,
    part: str | None = None,
    depth: str | None = None,
    family: str | None = None,
    labels: Sequence[str] | None = None,
    card: CardSettings | None = None,
    check: bool = True,
    force: bool = False,
) -> Exported:
    """Write the folder ``out``, completely or not at all.

    Args:
        out: the folder to write; with ``force`` an existing exported folder is replaced.
        part: encoder, generator, discriminator or mlm; for the default see :func:`.parts.choose_part`.
        depth: of the generator; the default is the deepest.
        family: mpnet, electra, bert or roberta, if several can represent the part.
        labels: names of the classes of a fine-tuned head.
        check: load the folder and compare it with the checkpoint.

    Raises:
        UserError: the part does not exist, no class or tokenizer computes the same, ``out`` exists or cannot be written, or
            the folder differs from the checkpoint.
    """
    card = card or CardSettings()
    check_card_settings(card)
    chosen = choose_part(loaded, part, depth, labels)
    family = choose_family(chosen, str(loaded.model.cfg.pooler_activation_fn), family)
    tokenizer = folder_tokenizer(loaded.tokenizer, family, chosen.shape.max_positions, num_separators(loaded))
    target = Target(out.name, class_name(chosen, family), family == CUSTOM or tokenizer.has_code)
    with export_folder(out, force) as unfinished, without_progress_bars():
        write_model(unfinished, chosen, family, tokenizer)
        tokenizer.save(unfinished)
        agreement = verify_folder(unfinished, loaded, chosen, tokenizer.ids, target.has_code) if check else None
        checked = f"Before this folder was written, both were loaded and compared: {agreement}"
        write_card(unfinished, target, loaded, chosen, card, checked if agreement else "Not compared (--no-check)")
    class_labels = list(chosen.settings.get("id2label", {}).values())
    return Exported(target.class_name, chosen.description, target.has_code, class_labels, agreement)


def num_separators(loaded: LoadedCheckpoint) -> int:
    """Return the number of ``</s>`` between the texts of a pair; raise :class:`UserError` for another separator token."""
    if loaded.separator not in (None, loaded.dictionary.eos()):
        raise UserError(
            f"{loaded.file} was fine-tuned with --separator-token {loaded.separator}, which is not </s> "
            f"({loaded.dictionary.eos()}): exported tokenizers write only </s> between two texts"
        )
    return 1 if loaded.separator is None else 2


def choose_family(part: Part, activation: str, wanted: str | None) -> str:
    """Return mpnet, electra, bert, roberta or ``CUSTOM``: ``wanted``, or by default the closest.

    ``activation``: of the classification heads of the objective, tanh or gelu.

    Raises:
        UserError: no class of the family computes this part.
    """
    families = families_of(part.kind, part.shape, activation)
    if wanted is None:
        return families[0]
    if wanted not in families:
        raise UserError(
            f"--as {wanted}: {part.description} of this checkpoint can be exported as {' or '.join(families)}"
            " (positions, width of the embeddings and activation of the head decide)"
        )
    return wanted


def class_name(part: Part, family: str) -> str:
    if family == CUSTOM:
        return FAMILIES["mpnet"].classes[part.kind].replace("MPNet", "Amos")
    return FAMILIES[family].classes[part.kind]


def write_model(folder: Path, part: Part, family: str, tokenizer: FolderTokenizer) -> None:
    """Write ``model.safetensors``, float32, and ``config.json``; for custom positions also their code."""
    model = build_model(part, family, tokenizer)
    if family == CUSTOM:
        custom_code.write_code(folder, custom_code.MODEL_CODE)
        model.config.auto_map = custom_code.model_auto_map()
    model.save_pretrained(folder, safe_serialization=True)
    # safetensors creates files that only their owner can read; all other files follow the user's umask.
    (folder / WEIGHTS_FILE).chmod((folder / CONFIG_FILE).stat().st_mode)


@torch.no_grad()
def build_model(part: Part, family: str, tokenizer: FolderTokenizer) -> "PreTrainedModel":
    """Build the model in eval mode, float32, with the vocabulary in the order of ``tokenizer``.

    AutoModel adds a pooling layer to a bare encoder. It gets the identity: ``pooler_output`` is then tanh of the first state,
    not random.
    """
    embedding = to_hugging_face_rows(part.weights["embed_tokens.weight"], tokenizer.ids, tokenizer.num_rows)
    weights = part.weights | {"embed_tokens.weight": embedding}
    if part.kind == MASKED_LM:
        weights["mlm_head.bias"] = _output_bias(part.weights["mlm_head.bias"], tokenizer)
    state = to_hugging_face("mpnet" if family == CUSTOM else family, part.kind, weights)
    model = _model_class(part, family)(build_config(part, family, tokenizer))
    if part.kind == ENCODER and getattr(model, "pooler", None) is not None:
        width = part.shape.width
        state |= {"pooler.dense.weight": torch.eye(width), "pooler.dense.bias": torch.zeros(width)}
    model.load_state_dict(state, strict=True)
    return model.eval()


def build_config(part: Part, family: str, tokenizer: FolderTokenizer) -> "PretrainedConfig":
    roles = (("bos", BOS), ("pad", PAD), ("eos", EOS))
    ids = {f"{role}_token_id": tokenizer.special_ids.get(symbol) for role, symbol in roles}
    others = {**part.settings, **ids, "architectures": [class_name(part, family)]}
    if family == CUSTOM:
        return custom_code.build_config(part.shape, tokenizer.num_rows, **others)
    return hugging_face_config(family, part.shape, tokenizer.num_rows, **others)


def _model_class(part: Part, family: str) -> type:
    if family == CUSTOM:
        from amos_fairseq.hugging_face.custom_code import modeling_amos as module
    else:
        import transformers as module
    return getattr(module, class_name(part, family))


def _output_bias(bias: Tensor, tokenizer: FolderTokenizer) -> Tensor:
    """Reorder the bias of the output layer; ids without a token, in the gaps of a foreign vocabulary, are never predicted."""
    biases = to_hugging_face_rows(bias, tokenizer.ids, tokenizer.num_rows)
    unused = torch.ones(tokenizer.num_rows, dtype=torch.bool)
    unused[tokenizer.ids[tokenizer.ids != ABSENT]] = False
    return biases.masked_fill(unused, NEVER_PREDICTED)


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


def check_output_folder(path: Path, replace: bool) -> None:
    """Raise :class:`UserError` unless an export may become ``path``; called before any long work.

    ``replace`` permits only an empty folder, or a folder with a model, which is removed with everything in it.
    """
    if path.name in ("", ".."):
        raise UserError(f"{path} has no name of its own: give the name of a folder to write")
    if not is_unicode(str(path)):
        raise UserError(f"{path} is not UTF-8, in which safetensors takes names: give another name")
    try:
        if not path.exists():
            return
    except OSError as error:  # a name that is too long, a folder that may not be read
        raise UserError(f"{path} cannot be a folder ({error.strerror}): give the name of a folder to write") from error
    if not path.is_dir():
        raise UserError(f"{path} is a file: give the name of a folder")
    if not replace:
        raise UserError(f"{path} exists: give another folder, or --force to replace it")
    if not (path / CONFIG_FILE).is_file() and any(path.iterdir()):
        raise UserError(
            f"{path} holds no exported model ({CONFIG_FILE} is missing in it), and --force replaces nothing else: give "
            "another folder, or remove this one"
        )


@contextmanager
def export_folder(path: Path, replace: bool) -> Iterator[Path]:
    """Yield an empty folder that becomes ``path``, completely or not at all: see :func:`amos_fairseq.files.whole_folder`.

    Raises:
        UserError: ``path`` may not be written (:func:`check_output_folder`), or nothing can be written there.
    """
    check_output_folder(path, replace)
    try:
        with whole_folder(path, replace) as unfinished:
            yield unfinished
    except UserError:
        raise
    except Exception as error:
        cause = os_error_behind(error)
        if cause is None:
            raise
        raise UserError(
            f"{path} cannot be written ({cause.strerror or cause}): make room, permit writing, or give another folder"
        ) from error
