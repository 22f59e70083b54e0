"""A checkpoint of ours as a folder that Hugging Face's libraries load: weights, configuration, tokenizer, model card."""

from contextlib import contextmanager
from pathlib import Path
from typing import Iterator, NamedTuple, Optional, Sequence

from amos_fairseq.interop.checkpoint import Pretrained
from amos_fairseq.interop.export_card import CardSettings, Target, check_settings, write_card
from amos_fairseq.interop.export_check import Agreement, check_folder
from amos_fairseq.interop.export_choice import choose_part
from amos_fairseq.interop.export_code import MODEL_CODE, write_code
from amos_fairseq.interop.export_folder import whole_folder
from amos_fairseq.interop.export_model import AUTO_CLASSES, build_model, choose_family, class_name
from amos_fairseq.interop.export_parts import Part
from amos_fairseq.interop.export_tokenizer import FolderTokenizer, folder_tokenizer
from amos_fairseq.interop.hugging_face_config import CUSTOM


class Exported(NamedTuple):
    """What :func:`export` wrote."""

    class_name: str
    description: str
    brings_code: bool
    labels: list[str]  # of the classes, in their order
    agreement: Optional[Agreement]  # None where nothing was compared


def export(
    pretrained: Pretrained,
    out: Path,
    part: Optional[str] = None,
    depth: Optional[str] = None,
    family: Optional[str] = None,
    labels: Optional[Sequence[str]] = None,
    card: Optional[CardSettings] = None,
    check: bool = True,
    force: bool = False,
) -> Exported:
    """Write ``out``, whole or not at all.

    Args:
        pretrained: a checkpoint of ours.
        out: the folder to write; with ``force`` an exported one that exists is replaced.
        part: encoder, generator, discriminator or mlm; without it a fine-tuned head, MLM's network with its head, or the
            encoder of another pretraining run.
        depth: of the generator; the deepest without it.
        family: mpnet, electra, bert or roberta, where several can hold the part.
        labels: names of the classes of a fine-tuned head.
        card: what the model card cannot know.
        check: load the folder and compare it with the checkpoint.

    Raises:
        UserError: the part does not exist, no class or tokenizer computes the same, ``out`` exists or cannot be written, or
            both sides differ.
    """
    check_settings(card or CardSettings())
    chosen = choose_part(pretrained, part, depth, labels)
    family = choose_family(chosen, family)
    tokenizer = folder_tokenizer(pretrained.tokenizer, family, chosen.shape.max_positions)
    name, trusts = class_name(chosen, family), family == CUSTOM or tokenizer.brings_code
    with whole_folder(out, force) as unfinished, without_progress_bars():
        write_model(unfinished, chosen, family, tokenizer)
        tokenizer.save(unfinished)
        agreement = check_folder(unfinished, pretrained, chosen, tokenizer.ids, trusts) if check else None
        checked = f"Before this folder was written, both were loaded and compared: {agreement}"
        checked = checked if agreement else "Not compared (--no-check)"
        write_card(unfinished, Target(out.name, name, trusts), pretrained, chosen, card or CardSettings(), checked)
    labels = list(chosen.settings.get("id2label", {}).values())
    return Exported(name, chosen.description, trusts, labels, agreement)


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """transformers 5 shows a progress bar for each file of weights that it writes or reads."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def write_model(folder: Path, part: Part, family: str, tokenizer: FolderTokenizer) -> None:
    """``model.safetensors``, float32, and ``config.json``; with positions of our own, their code too."""
    from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_NAME

    model = build_model(part, family, tokenizer)
    if family == CUSTOM:
        write_code(folder, MODEL_CODE)
        model.config.auto_map = {
            "AutoConfig": "modeling_amos.AmosConfig",
            AUTO_CLASSES[part.kind]: f"modeling_amos.{class_name(part, family)}",
        }
    model.save_pretrained(folder, safe_serialization=True)
    # safetensors writes for the owner alone, all other files follow the user's umask.
    (folder / SAFE_WEIGHTS_NAME).chmod((folder / CONFIG_NAME).stat().st_mode)
