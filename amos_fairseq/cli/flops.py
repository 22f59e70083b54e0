"""``amos flops``: count the floating point operations that a configuration costs in training and in inference."""

import argparse
from typing import Any

from amos_fairseq.cli.arguments import add_overrides, add_subcommand, import_fairseq, number
from amos_fairseq.recipes import DEFAULT_VOCABULARY
from amos_fairseq.text import LARGEST_VOCABULARY

DESCRIPTION = """\
Count the floating point operations of a configuration on its own model, loss and batch, without data: the matrix products of
the forward and backward pass as autograd runs them (the backward pass costs twice the forward pass, less where a gradient is
stopped). What model.kernels runs on a GPU is counted: the output layer computes its logits once for loss and samples, and again
in the backward pass. Inference is the forward pass of the final encoder over 128 tokens, or the model's maximum. The
optimizer's step is not counted. An update consists of the batches of all ranks: one rank per GPU of this machine, unless
distributed_training.distributed_world_size sets another number.
"""


def add_parser(subparsers: Any) -> None:
    parser = add_subcommand(subparsers, "flops", "count the FLOPs of training and inference", DESCRIPTION, run)
    add = parser.add_argument
    text = "recipe such as amos_base (amos recipes lists them), path of a YAML file, checkpoint, or SAVE_DIR"
    add("config", metavar="CONFIG", help=text)
    add_overrides(parser, "optimization.max_update=1000")
    text = "number of dictionary entries, special tokens included "
    text += f"(default: that of the checkpoint, or of task.data where it is set, or {DEFAULT_VOCABULARY})"
    smallest = 6  # the special symbols, <mask> and a piece
    add("--vocabulary-size", type=number(int, smallest, LARGEST_VOCABULARY), metavar="N", help=text)
    text = "count the reference implementation (model.kernels=reference), which keeps all logits instead of computing "
    text += "them again, samples from logits of its own, and computes the last layer at every position "
    parser.add_argument("--reference", action="store_true", help=text + "(default: count what model.kernels runs)")


def run(arguments: argparse.Namespace) -> None:
    import_fairseq()
    from amos_fairseq.flops import print_report, read_configuration, report_flops

    cfg, vocabulary_size = read_configuration(arguments.config, arguments.overrides)
    if arguments.vocabulary_size is not None:
        vocabulary_size = arguments.vocabulary_size
    print_report(arguments.config, report_flops(cfg, vocabulary_size, arguments.reference))
