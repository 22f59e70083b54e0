"""``amos export``: write a checkpoint as a folder for Hugging Face libraries."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from amos_fairseq.cli.arguments import add_checkpoint, add_subcommand, import_fairseq
from amos_fairseq.errors import UserError

if TYPE_CHECKING:
    from amos_fairseq.hugging_face.parts import Part
    from amos_fairseq.hugging_face.verify import Agreement

DESCRIPTION = """\
Write CHECKPOINT as the folder OUT, which transformers, sentence-transformers and ONNX exporters load without this package:
model.safetensors, config.json, tokenizer.json with the same token ids, and a model card. A fine-tuned checkpoint becomes a
classification or question answering model, an mlm checkpoint a masked language model, any other pretraining checkpoint its
encoder without a head (MPNetModel with t5 positions; ElectraModel or BertModel without relative positions). Only the
positions of the released AMOS checkpoint need custom code, which is then part of the folder (trust_remote_code=True). The
command loads OUT and compares it with CHECKPOINT before it puts the folder in place, and writes nothing where they differ.
"""


def add_parser(subparsers: Any) -> None:
    parser = add_subcommand(subparsers, "export", "write a checkpoint as a Hugging Face folder", DESCRIPTION)
    add_checkpoint(parser)
    add = parser.add_argument
    add("out", metavar="OUT", type=Path, help="folder to write")
    text = "part to export (default: the fine-tuned head or the MLM head with its encoder; otherwise the encoder alone)"
    add("--part", choices=("encoder", "generator", "discriminator", "mlm"), help=text)
    text = "of a model of several tasks, the task or column whose head to export; ALL writes a folder in OUT for each "
    add("--head", metavar="TASK", help=text + "(default: the encoder without a head)")
    add("--depth", metavar="D", help="depth of the generator (default: the deepest)")
    text = "model family, where several compute the same function (default: the closest)"
    add("--as", dest="family", choices=("mpnet", "electra", "bert", "roberta"), help=text)
    text = "class names of a fine-tuned head, in order (default: those of the task's data, else LABEL_0, ...)"
    add("--labels", metavar="A,B,...", help=text)
    add("--data-license", metavar="ID", default="unknown", help="license of the training data, for the model card")
    add("--language", metavar="CODE", help="language of the training data, such as en (default: not stated)")
    text = "name on the Hub of the model that was imported and trained further (default: not stated)"
    add("--base-model", metavar="ID", help=text)
    text = "name on the Hub of a training data set; repeatable (default: not stated)"
    add("--dataset", dest="datasets", metavar="ID", action="append", default=[], help=text)
    text = "do not compare the folder with the checkpoint (default: compare)"
    add("--no-check", dest="check", action="store_false", help=text)
    add("--force", action="store_true", help="replace OUT if it is an exported folder (default: refuse)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    import_fairseq(arguments.checkpoint, arguments.subcommand)
    from amos_fairseq.hugging_face.export import ALL_HEADS, export, export_heads
    from amos_fairseq.hugging_face.model_card import CardSettings

    labels = None if arguments.labels is None else [label.strip() for label in arguments.labels.split(",")]
    card = CardSettings(arguments.data_license, arguments.language, arguments.base_model, tuple(arguments.datasets))
    options = {"family": arguments.family, "card": card, "check": arguments.check}
    place = (arguments.checkpoint, arguments.out, arguments.tokenizer, arguments.force)
    if arguments.head == ALL_HEADS:
        for flag in ("part", "depth", "labels"):
            if getattr(arguments, flag) is not None:
                raise UserError(f"--{flag} has no effect with --head {ALL_HEADS}: leave it out")
        for head, exported in export_heads(*place, **options).items():
            _report(arguments.out / head, *exported)
        return
    options |= {"part": arguments.part, "depth": arguments.depth, "labels": labels, "head": arguments.head}
    _report(arguments.out, *export(*place, **options))


def _report(out: Path, part: "Part", agreement: "Agreement | None") -> None:
    from amos_fairseq.hugging_face import custom_code

    code = "; it contains custom code: trust_remote_code=True" if custom_code.is_in(out) else ""
    print(f"{out}: {part.class_name}, {part.description}{code}")
    if part.labels:
        print(f"labels: {', '.join(part.labels)}")
    print(f"compared with the checkpoint: {agreement or 'not (--no-check)'}")
