"""``amos export``: a checkpoint of ours as a folder for Hugging Face's libraries."""

import argparse
from pathlib import Path
from typing import Any

DESCRIPTION = """\
Write CHECKPOINT as the folder OUT, which transformers, sentence-transformers and ONNX exporters load without code of ours:
model.safetensors, config.json, tokenizer.json with the very token ids of this package, and a model card. A fine-tuned
checkpoint becomes a model for classification or question answering, an mlm a masked language model, any other pretraining
checkpoint its plain encoder (MPNetModel with t5 positions; ElectraModel or BertModel without relative positions). Only the
positions of the released AMOS checkpoint need code, which then lies in the folder (trust_remote_code=True). OUT is loaded
and compared with CHECKPOINT before it gets its name; nothing is left where they differ.
"""


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "export",
        help="to Hugging Face",
        description=DESCRIPTION,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "checkpoint", metavar="CHECKPOINT", help="a checkpoint, or the SAVE_DIR of a run (its last one)"
    )
    parser.add_argument("out", metavar="OUT", type=Path, help="the folder to write")
    parser.add_argument(
        "--part", choices=("encoder", "generator", "discriminator", "mlm"), default=argparse.SUPPRESS,
        help="what of the checkpoint (default: the fine-tuned head with its encoder; of a pretraining run the encoder, of an "
        "mlm with its head)",
    )  # fmt: skip
    parser.add_argument(
        "--depth", metavar="D", default=argparse.SUPPRESS, help="depth of the generator (default: the deepest)"
    )
    parser.add_argument(
        "--as", dest="family", choices=("mpnet", "electra", "bert", "roberta"), default=argparse.SUPPRESS,
        help="family of classes, where several compute the same (default: the nearest)",
    )  # fmt: skip
    parser.add_argument(
        "--labels", metavar="A,B,...", default=argparse.SUPPRESS,
        help="names of the classes of a fine-tuned head, in their order (default: those of the task's data, else LABEL_0, ...)",
    )  # fmt: skip
    parser.add_argument(
        "--tokenizer", metavar="DIR", default=argparse.SUPPRESS,
        help="tokenizer of the run (default: the tokenizer directory beside the checkpoint)",
    )  # fmt: skip
    parser.add_argument(
        "--data-license", metavar="ID", default="unknown", help="licence of the training data, for the card"
    )
    parser.add_argument(
        "--language", metavar="CODE", default=argparse.SUPPRESS,
        help="language of the training data, such as en, for the card (default: not stated)",
    )  # fmt: skip
    parser.add_argument(
        "--no-check", dest="check", action="store_false", default=argparse.SUPPRESS,
        help="do not compare the folder with the checkpoint (default: compare)",
    )  # fmt: skip
    parser.add_argument(
        "--force",
        action="store_true",
        default=argparse.SUPPRESS,
        help="replace OUT if it is an exported folder (default: refuse)",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    # Imported here: the model and its libraries take seconds that `amos --help` need not wait.
    from amos_fairseq.checkpoints.read import load_pretrained
    from amos_fairseq.hugging_face.export import check_output_folder, export
    from amos_fairseq.hugging_face.model_card import CardSettings

    force = getattr(arguments, "force", False)
    check_output_folder(arguments.out, force)  # before any long work
    pretrained = load_pretrained(arguments.checkpoint, getattr(arguments, "tokenizer", None))
    exported = export(
        pretrained,
        arguments.out,
        part=getattr(arguments, "part", None),
        depth=getattr(arguments, "depth", None),
        family=getattr(arguments, "family", None),
        labels=[label.strip() for label in arguments.labels.split(",")] if hasattr(arguments, "labels") else None,
        card=CardSettings(arguments.data_license, getattr(arguments, "language", None)),
        check=getattr(arguments, "check", True),
        force=force,
    )
    code = "; it brings its own code: trust_remote_code=True" if exported.has_code else ""
    print(f"{arguments.out}: {exported.class_name}, {exported.description}{code}")
    if exported.labels:
        print(f"labels: {', '.join(exported.labels)}")
    print(f"compared with the checkpoint: {exported.agreement or 'not (--no-check)'}")
