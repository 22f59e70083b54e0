"""``amos export``: write a checkpoint as a folder for Hugging Face libraries."""

import argparse
from pathlib import Path
from typing import Any

from amos_fairseq.cli.arguments import add_checkpoint, add_subcommand, import_fairseq
from amos_fairseq.files import check_new_folder

DESCRIPTION = """\
Write CHECKPOINT as the folder OUT, which transformers, sentence-transformers and ONNX exporters load without this package:
model.safetensors, config.json, tokenizer.json with the same token ids, and a model card. A fine-tuned checkpoint becomes a
classification or question answering model, an mlm checkpoint a masked language model, any other pretraining checkpoint its
encoder without a head (MPNetModel with t5 positions; ElectraModel or BertModel without relative positions). Only
classifiers on the mean of all states (--pooling mean), except on ModernBERT, and the positions of the released AMOS checkpoint
need custom code, which is then part of the folder (trust_remote_code=True). The command loads OUT and compares it with
CHECKPOINT before it puts the folder in place, and writes nothing where they differ.
"""


def add_parser(subparsers: Any) -> None:
    parser = add_subcommand(subparsers, "export", "write a checkpoint as a Hugging Face folder", DESCRIPTION, run)
    add_checkpoint(parser, "its last checkpoint; of fine-tuning the one that was scored")
    add = parser.add_argument
    add("out", metavar="OUT", type=Path, help="folder to write")
    part_or_head = parser.add_mutually_exclusive_group()
    text = "part to export; pair: DeBERTaV3's networks in their authors' form (default: the fine-tuned head or the MLM head "
    text += "with its encoder; otherwise the encoder alone)"
    part_or_head.add_argument("--part", choices=("encoder", "generator", "discriminator", "mlm", "pair"), help=text)
    text = "the task or column whose head to export, of several (default: the encoder without a head)"
    part_or_head.add_argument("--head", metavar="TASK", help=text)
    text = "do not compare the folder with the checkpoint (default: compare)"
    add("--no-check", dest="check", action="store_false", help=text)
    add("--force", action="store_true", help="replace OUT if it is an exported folder (default: refuse)")


def run(arguments: argparse.Namespace) -> None:
    check_new_folder(arguments.out, arguments.force)
    import_fairseq(arguments.checkpoint, arguments.subcommand, [arguments.tokenizer])
    from amos_fairseq.hugging_face import custom_code
    from amos_fairseq.hugging_face.export import export

    options = {name: getattr(arguments, name) for name in ("tokenizer", "force", "part", "head", "check")}
    part, agreement = export(arguments.checkpoint, arguments.out, **options)
    code = "; it contains custom code: trust_remote_code=True" if custom_code.is_in(arguments.out) else ""
    print(f"{arguments.out}: {part.class_name}, {part.description}{code}")
    if part.labels:
        print(f"labels: {', '.join(part.labels)}")
    print(f"compared with the checkpoint: {agreement or 'not (--no-check)'}")
