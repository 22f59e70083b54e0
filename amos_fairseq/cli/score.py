"""``amos score``: pseudo-log-likelihoods of lines, and accuracy on minimal pairs."""

import argparse
from pathlib import Path
from typing import Any

from amos_fairseq.cli.arguments import SIZE, add_checkpoint, add_subcommand, import_fairseq
from amos_fairseq.errors import UserError

DESCRIPTION = """\
Score each line of FILE with CHECKPOINT: log p of every token given all others, in nats, and their sum, the
pseudo-log-likelihood (PLL). A model of the objective electric (or a variant) needs one forward pass per line, an mlm one per
token, ELECTRA one per token for its generator and a single one for its discriminator. Electric's scores are unnormalized. A
piece that the vocabulary does not contain is scored as random characters. An empty line has PLL 0; a line longer than the
maximum input of the model has no score.

With --pairs, the command reports how often the model scores the grammatical one of two sentences higher. The score is the PLL
of an mlm or electric. Of electra, teams and amos it is the sum of log P(original) over the pieces, from one pass of the
discriminator: no probability of a sentence, but an order.
"""


def add_parser(subparsers: Any) -> None:
    parser = add_subcommand(subparsers, "score", "score text, or minimal pairs, with a model", DESCRIPTION, run)
    add_checkpoint(parser)
    add = parser.add_argument
    add("file", metavar="FILE", nargs="?", help="UTF-8 text, one sequence per line; - for the standard input")
    text = "file for the scores, tab-separated values with a header; with --pairs JSON (default: the terminal)"
    add("--out", metavar="OUT", type=Path, help=text)
    add("--batch-tokens", type=SIZE, metavar="N", default=2048, help="tokens of a batch; give more on a GPU")
    add("--device", default="cpu", help="device to compute on, such as cuda or cuda:1")
    add = parser.add_argument_group("minimal pairs").add_argument
    text = "instead of FILE: tables with sentence_good and sentence_bad, as in BLiMP, or sen and wrong_sen, as in MultiBLiMP "
    text += "(default: score FILE)"
    add("--pairs", metavar="F", type=Path, nargs="+", help=text)


def run(arguments: argparse.Namespace) -> None:
    out = arguments.out
    if (arguments.file is None) == (arguments.pairs is None):
        arguments.parser.error("give either FILE or --pairs FILE")
    inputs = [Path(path).resolve() for path in arguments.pairs or [arguments.file]]
    if out is not None and (out.resolve() in inputs or out.is_dir()):
        raise UserError(f"--out {out} is an input file or a folder: give another name")
    texts = arguments.pairs or ([] if arguments.file == "-" else [arguments.file])
    import_fairseq(arguments.checkpoint, inputs=[*texts, arguments.tokenizer])
    from amos_fairseq.checkpoints.encoder import check_device
    from amos_fairseq.hugging_face.import_folder import load_model
    from amos_fairseq.scoring.lines import score_file
    from amos_fairseq.scoring.minimal_pairs import score_pairs
    from amos_fairseq.scoring.token_scorers import build_token_scorer

    check_device(arguments.device)
    loaded = load_model(arguments.checkpoint, arguments.tokenizer)
    loaded.model.to(arguments.device)
    if arguments.pairs is None:
        score_file(loaded, build_token_scorer(loaded, arguments.batch_tokens), arguments.file, out)
    else:
        score_pairs(loaded, arguments.pairs, arguments.batch_tokens, out).print()
    if out is not None:
        print(f"scores: {out}")
