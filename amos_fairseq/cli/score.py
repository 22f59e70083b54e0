"""``amos score``: pseudo-log-likelihoods of lines, and n-best lists re-ranked with them."""

import argparse
import math
from pathlib import Path
from typing import Any

from amos_fairseq.errors import UserError

DESCRIPTION = """\
Score each line of FILE with CHECKPOINT: log p of every piece given all others, in nats, and their sum, the
pseudo-log-likelihood (PLL). Models of the objective electric (and its variants electra_tt and two_tower) read a line once,
an MLM once for every piece, ELECTRA's generator once for every piece and its discriminator once. Electric's numbers are
unnormalised. An empty line has PLL 0, a line longer than the model reads has none. With --out, the same command continues
where it was stopped. With --rerank, n-best lists of a recogniser or translator are re-ranked by score + lambda PLL, and word
error rates are counted before and after.
"""
CONTENTS = 'JSON {"id": {"reference": "...", "hypotheses": [{"text": "...", "score": -1.5}, ...]}, ...}'


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "score",
        help="how likely a model finds a text; re-rank n-best lists",
        description=DESCRIPTION,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "checkpoint", metavar="CHECKPOINT", help="a checkpoint, or the SAVE_DIR of a run (its last one)"
    )
    parser.add_argument(
        # A type would turn the word that argparse uses for SUPPRESS into a path.
        "file",
        metavar="FILE",
        nargs="?",
        default=argparse.SUPPRESS,
        help="UTF-8 text, a line each",
    )
    add_reranking_flags(parser)
    parser.add_argument(
        "--format", choices=("tsv", "jsonl"), default=argparse.SUPPRESS,
        help="tab-separated values with a head, or an object a line (default: tsv)",
    )  # fmt: skip
    parser.add_argument(
        "--out", metavar="OUT", type=Path, default=argparse.SUPPRESS,
        help="file for the scores, or the JSON of --rerank (default: the terminal)",
    )  # fmt: skip
    parser.add_argument(
        "--tokenizer", metavar="DIR", default=argparse.SUPPRESS,
        help="tokenizer of the run (default: the tokenizer directory beside the checkpoint)",
    )  # fmt: skip
    parser.add_argument(
        "--electra-formula", metavar="F", choices=("exact", "thesis"), default=argparse.SUPPRESS,
        help="what follows from ELECTRA's discriminator by the labels that it learned (exact), or by those of thesis section "
        "5.4.5 (thesis) (default: exact)",
    )  # fmt: skip
    parser.add_argument(
        "--batch-tokens", type=int, metavar="N", default=4096, help="tokens that go through the model at once"
    )
    parser.add_argument("--device", default="cpu", help="where to compute, such as cuda or cuda:1")
    parser.set_defaults(run=lambda arguments: run(arguments, parser))


def add_reranking_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("re-ranking (thesis section 5.4.5)")
    group.add_argument(
        "--rerank", metavar="NBEST", type=Path, default=argparse.SUPPRESS,
        help=f"instead of FILE: {CONTENTS} (default: score FILE)",
    )  # fmt: skip
    weight = group.add_mutually_exclusive_group()
    weight.add_argument(
        "--dev", metavar="NBEST", type=Path, default=argparse.SUPPRESS,
        help="lists on which lambda is chosen from 0.05, 0.10, ..., 1.0 by word error rate (default: give --lambda)",
    )  # fmt: skip
    weight.add_argument(
        "--lambda", dest="weight", metavar="X", type=float, default=argparse.SUPPRESS,
        help="weight of the PLL (default: the best on --dev)",
    )  # fmt: skip


def run(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    check_flags(arguments, parser)
    # Imported here: the model and its libraries take seconds that `amos --help` need not wait.
    from amos_fairseq.checkpoints.encoder import check_device
    from amos_fairseq.checkpoints.read import load_pretrained
    from amos_fairseq.scoring.jobs import rerank, score_file
    from amos_fairseq.scoring.pseudo_likelihood import LineScorer

    check_device(arguments.device)
    pretrained = load_pretrained(arguments.checkpoint, getattr(arguments, "tokenizer", None))
    pretrained.model.to(arguments.device)
    scorer = LineScorer(pretrained, arguments.batch_tokens, getattr(arguments, "electra_formula", None))
    out = getattr(arguments, "out", None)
    if hasattr(arguments, "rerank"):
        rerank(scorer, arguments.rerank, getattr(arguments, "dev", None), getattr(arguments, "weight", None), out)
    else:
        score_file(scorer, Path(arguments.file), getattr(arguments, "format", "tsv"), out)
    if out is not None:
        print(f"scores: {out}")


def check_flags(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Status 2 for flags that do not go together, :class:`UserError` for numbers out of range."""
    reranks = hasattr(arguments, "rerank")
    if reranks == hasattr(arguments, "file"):
        parser.error("give either FILE or --rerank NBEST")
    if reranks and not (hasattr(arguments, "dev") or hasattr(arguments, "weight")):
        parser.error("--rerank needs --dev NBEST to choose lambda on, or --lambda X")
    for flag in ("dev", "weight") if not reranks else ("format",):
        if hasattr(arguments, flag):
            shown = {"weight": "lambda"}.get(flag, flag)
            parser.error(f"--{shown} has no meaning {'with' if reranks else 'without'} --rerank")
    sources = [Path(getattr(arguments, name)) for name in ("file", "rerank", "dev") if hasattr(arguments, name)]
    if hasattr(arguments, "out") and arguments.out.resolve() in [source.resolve() for source in sources]:
        raise UserError(f"--out {arguments.out} is the text itself: give another place")
    if arguments.batch_tokens < 1:
        raise UserError(f"--batch-tokens {arguments.batch_tokens} must be 1 or more")
    if not 0 <= getattr(arguments, "weight", 0.0) < math.inf:
        raise UserError(f"--lambda {arguments.weight} must be a number from 0 on")
