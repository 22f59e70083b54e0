"""``amos flops``: what a configuration costs to train and to use, in floating point operations."""

import argparse
import json
from typing import Any

DEFAULT_VOCABULARY = 32_768  # AMOS section 4

DESCRIPTION = """\
Count the floating point operations of a configuration on its own model, loss and batch, without data and without running
anything. Two conventions. "today": the matrix products of forward and backward pass as autograd runs them (backward is
twice the forward pass, less where a gradient is stopped). "thesis" (Clark 2021, section 5.2.2, the FLOPs of ELECTRA's
tables): backward equals forward, embeddings are looked up by products with one-hot vectors, element-wise operations count.
Reading a text is the forward pass of the encoder that is kept. The optimizer's step is in neither. An update is the batches
of all ranks: of one for each GPU of this machine, unless distributed_training.distributed_world_size says otherwise.
"""


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "flops",
        help="operations that a configuration costs in training and in use",
        description=DESCRIPTION,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "config",
        metavar="CONFIG",
        help="a recipe of examples/pretraining/config such as amos_base, the path of a YAML, a checkpoint, or a SAVE_DIR",
    )
    parser.add_argument(
        "--set", dest="overrides", nargs="+", action="extend", metavar="KEY=VALUE", default=[],
        help="settings to change, such as optimization.max_update=1000",
    )  # fmt: skip
    parser.add_argument(
        "--vocabulary-size", type=int, metavar="N", default=argparse.SUPPRESS,
        help="entries of the dictionary, special symbols included (default: those of the checkpoint, or of task.data "
        f"where it is given, or {DEFAULT_VOCABULARY})",
    )  # fmt: skip
    parser.add_argument(
        "--length", type=int, metavar="T", default=argparse.SUPPRESS,
        help="tokens of the text that the trained encoder reads (default: 128, or what the model can read)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print JSON, whole numbers, instead of tables")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    # Imported here: the models take seconds that `amos --help` need not wait.
    from omegaconf import OmegaConf

    from amos_fairseq.cli.flops_table import print_report
    from amos_fairseq.flops.recipe import read_configuration
    from amos_fairseq.flops.report import report_flops

    cfg, vocabulary_size = read_configuration(arguments.config, arguments.overrides)
    vocabulary_size = getattr(arguments, "vocabulary_size", vocabulary_size)
    if vocabulary_size is None and OmegaConf.is_missing(cfg.task, "data"):
        vocabulary_size = DEFAULT_VOCABULARY
    report = report_flops(cfg, vocabulary_size, getattr(arguments, "length", None))
    if arguments.json:
        print(json.dumps({"config": arguments.config, **report.as_json()}, indent=2))
    else:
        print_report(arguments.config, report)
