"""``amos export``: write a checkpoint as a folder for Hugging Face libraries."""

import argparse
import dataclasses
import re
import reprlib
from pathlib import Path
from typing import Any

from amos_fairseq.cli.arguments import add_checkpoint, add_subcommand, import_fairseq, refuse_given
from amos_fairseq.files import check_new_folder

DESCRIPTION = """\
Write CHECKPOINT as the folder OUT, which transformers, sentence-transformers and ONNX exporters load without this package:
model.safetensors, config.json, tokenizer.json with the same token ids, and a model card. A fine-tuned checkpoint becomes a
classification or question answering model, an mlm checkpoint a masked language model, any other pretraining checkpoint its
encoder without a head (MPNetModel with t5 positions; ElectraModel or BertModel without relative positions). Only the
positions of the released AMOS checkpoint need custom code, which is then part of the folder (trust_remote_code=True). The
command loads OUT and compares it with CHECKPOINT before it puts the folder in place, and writes nothing where they differ.
"""


def add_parser(subparsers: Any) -> None:
    parser = add_subcommand(subparsers, "export", "write a checkpoint as a Hugging Face folder", DESCRIPTION, run)
    add_checkpoint(parser, "its last checkpoint; of fine-tuning the one that was scored")
    add = parser.add_argument
    add("out", metavar="OUT", type=Path, help="folder to write")
    of_model = parser.add_mutually_exclusive_group()
    text = "part to export (default: the fine-tuned head or the MLM head with its encoder; otherwise the encoder alone)"
    of_model.add_argument("--part", choices=("encoder", "generator", "discriminator", "mlm"), help=text)
    text = "the task or column whose head to export, of several; ALL writes a folder in OUT for each "
    of_model.add_argument("--head", metavar="TASK", help=text + "(default: the encoder without a head)")
    add("--depth", metavar="D", help="depth of the generator (default: the deepest)")
    text = "class names of a fine-tuned head, in order (default: those in the checkpoint, else LABEL_0, ...)"
    add("--labels", metavar="A,B,...", type=lambda names: [name.strip() for name in names.split(",")], help=text)
    text = "license of the training data, for the model card"
    add("--data-license", metavar="ID", type=card_name, default="unknown", help=text)
    text = "language of the training data, such as en (default: not stated)"
    add("--language", metavar="CODE", type=card_name, help=text)
    text = "name on the Hub of the model that was imported and trained further (default: not stated)"
    add("--base-model", metavar="ID", type=card_name, help=text)
    text = "name on the Hub of a training data set; repeatable (default: not stated)"
    add("--dataset", dest="datasets", metavar="ID", type=card_name, action="append", default=[], help=text)
    text = "do not compare the folder with the checkpoint (default: compare)"
    add("--no-check", dest="check", action="store_false", help=text)
    add("--force", action="store_true", help="replace OUT if it is an exported folder (default: refuse)")


def card_name(value: str) -> str:
    """A value that neither breaks the header of the model card nor is HTML on a web page."""
    if not re.fullmatch(r"(?=.*\w)[\w ./,:+-]{1,200}", value):
        raise argparse.ArgumentTypeError(
            f"{reprlib.repr(value)} is not a name: give an identifier such as cc-by-4.0, en or google/bert, of at most 200 "
            "letters, digits, spaces and . , : / + - _"
        )
    return value


def run(arguments: argparse.Namespace) -> None:
    if arguments.head == "ALL":
        refuse_given(arguments, ["depth", "labels"], "has no effect with --head ALL")
    check_new_folder(arguments.out, arguments.force)
    import_fairseq(arguments.checkpoint, arguments.subcommand, [arguments.tokenizer])
    from amos_fairseq.hugging_face import custom_code
    from amos_fairseq.hugging_face.export import CardSettings, export
    from amos_fairseq.hugging_face.parts import Choice

    choice = Choice(*(getattr(arguments, option.name) for option in dataclasses.fields(Choice)))
    card = CardSettings(arguments.data_license, arguments.language, arguments.base_model, tuple(arguments.datasets))
    exported = export(
        arguments.checkpoint, arguments.out, arguments.tokenizer, arguments.force, choice, card, arguments.check
    )
    for folder, (part, agreement) in exported.items():
        code = "; it contains custom code: trust_remote_code=True" if custom_code.is_in(folder) else ""
        print(f"{folder}: {part.class_name}, {part.description}{code}")
        if part.labels:
            print(f"labels: {', '.join(part.labels)}")
        print(f"compared with the checkpoint: {agreement or 'not (--no-check)'}")
