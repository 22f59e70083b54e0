"""``amos score``: pseudo-log-likelihoods of lines, reranking of n-best lists with them, and accuracy on minimal pairs."""

import argparse
import math
from pathlib import Path
from typing import Any

from amos_fairseq.cli.arguments import add_checkpoint, add_subcommand, import_fairseq
from amos_fairseq.errors import UserError

DESCRIPTION = """\
Score each line of FILE with CHECKPOINT: log p of every token given all others, in nats, and their sum, the
pseudo-log-likelihood (PLL). Models of the objective electric (and its variants) need one forward pass
per line, an mlm one per token, ELECTRA one per token for its generator and a single one for its discriminator. Electric's
scores are unnormalized. A piece that the vocabulary does not contain is scored as random characters. An empty line has PLL 0; a
line longer than the maximum input of the model has no score. With --out, the same command continues after a stop. With
--rerank, the command reranks n-best lists of a speech recognizer or translation system by score + lambda PLL, and reports word
error rates before and after.

With --pairs, the command reports how often the model scores the grammatical one of two sentences higher. The score is the PLL
of an mlm or electric. Of electra, teams and amos it is the sum of log P(original) over the pieces, from one pass of the
discriminator: no probability of a sentence, but an order.
"""
NBEST_FORMAT = 'JSON {"id": {"reference": "...", "hypotheses": [{"text": "...", "score": -1.5}, ...]}, ...}'


def add_parser(subparsers: Any) -> None:
    parser = add_subcommand(subparsers, "score", "score text with a model; rerank n-best lists", DESCRIPTION)
    add_checkpoint(parser)
    add = parser.add_argument
    add("file", metavar="FILE", nargs="?", help="UTF-8 text, one sequence per line; - for the standard input")
    add(
        "--format",
        choices=("tsv", "jsonl"),
        help="tab-separated values with a header, or one JSON object per line (default: tsv)",
    )
    add(
        "--out",
        metavar="OUT",
        type=Path,
        help="file for the scores, or for the JSON of --rerank; with --pairs NAME.json, beside which NAME.md, NAME.csv and "
        "NAME.pairs.csv are written (default: the terminal)",
    )
    add(
        "--electra-formula",
        metavar="F",
        choices=("exact", "thesis"),
        help="how scores follow from ELECTRA's discriminator: from the labels that it was trained with (exact), or from those "
        "of thesis section 5.4.5 (thesis) (default: exact)",
    )
    add("--batch-tokens", type=int, metavar="N", default=4096, help="number of tokens in a batch")
    add("--device", default="cpu", help="device to compute on, such as cuda or cuda:1")
    group = parser.add_argument_group("reranking (thesis section 5.4.5)")
    group.add_argument(
        "--rerank", metavar="NBEST", type=Path, help=f"instead of FILE: {NBEST_FORMAT} (default: score FILE)"
    )
    weight = group.add_mutually_exclusive_group()
    weight.add_argument(
        "--dev",
        metavar="NBEST",
        type=Path,
        help="lists on which lambda is chosen from 0.05, 0.10, ..., 1.0 by word error rate (default: use --lambda)",
    )
    weight.add_argument(
        "--lambda", dest="weight", metavar="X", type=float, help="weight of the PLL (default: the best on --dev)"
    )
    group = parser.add_argument_group("minimal pairs")
    group.add_argument(
        "--pairs",
        metavar="F",
        type=Path,
        nargs="+",
        help="instead of FILE: JSON lines with sentence_good and sentence_bad, as in BLiMP; also compressed "
        "(.gz, .xz, .zst) (default: score FILE)",
    )
    group.add_argument(
        "--corpus",
        metavar="DATA",
        type=Path,
        help="also score by the frequencies of pieces in the training text of this directory of amos prepare (default: do not)",
    )
    group.add_argument(
        "--baseline",
        action="store_true",
        help="also score by random weights in the same architecture (default: do not)",
    )
    parser.set_defaults(run=lambda arguments: run(arguments, parser))


def run(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    check_arguments(arguments, parser)
    import_fairseq(arguments.checkpoint)
    from amos_fairseq.checkpoints.encoder import check_device
    from amos_fairseq.checkpoints.read import load_checkpoint
    from amos_fairseq.scoring.jobs import rerank, score_file, stored_input
    from amos_fairseq.scoring.minimal_pairs import score_pairs
    from amos_fairseq.scoring.pseudo_likelihood import LineScorer

    check_device(arguments.device)
    loaded = load_checkpoint(arguments.checkpoint, arguments.tokenizer)
    loaded.model.to(arguments.device)
    if arguments.pairs is not None:
        score_pairs(
            loaded, arguments.pairs, arguments.batch_tokens, arguments.out, arguments.corpus, arguments.baseline
        ).print()
        if arguments.out is not None:
            stem = arguments.out.with_suffix("")
            print(f"results: {arguments.out}, {stem}.md, {stem}.csv, {stem}.pairs.csv")
        return
    scorer = LineScorer(loaded, arguments.batch_tokens, arguments.electra_formula)
    if arguments.rerank is not None:
        rerank(scorer, arguments.rerank, arguments.dev, arguments.weight, arguments.out)
    else:
        with stored_input(arguments.file) as file:
            score_file(scorer, file, arguments.format or "tsv", arguments.out)
    if arguments.out is not None:
        print(f"scores: {arguments.out}")


def check_arguments(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Exit with status 2 for arguments that exclude each other; raise :class:`UserError` for values out of range."""
    jobs = {"FILE": arguments.file, "--rerank": arguments.rerank, "--pairs": arguments.pairs}
    if len(given := [name for name, value in jobs.items() if value is not None]) != 1:
        parser.error("give either FILE, --rerank NBEST or --pairs FILE")
    (job,) = given
    if job == "--rerank" and arguments.dev is None and arguments.weight is None:
        parser.error("--rerank needs --dev NBEST to choose lambda on, or --lambda X")
    for flag, value, owners in (
        ("--format", arguments.format, ("FILE",)),
        ("--electra-formula", arguments.electra_formula, ("FILE", "--rerank")),
        ("--dev", arguments.dev, ("--rerank",)),
        ("--lambda", arguments.weight, ("--rerank",)),
        ("--corpus", arguments.corpus, ("--pairs",)),
        ("--baseline", arguments.baseline or None, ("--pairs",)),
    ):
        if value is not None and job not in owners:
            parser.error(f"{flag} has no effect " + (f"without {owners[0]}" if job == "FILE" else f"with {job}"))
    paths = (arguments.file, arguments.rerank, arguments.dev, *(arguments.pairs or ()))
    inputs = [Path(path).resolve() for path in paths if path is not None]
    if arguments.out is not None and arguments.out.resolve() in inputs:
        raise UserError(f"--out {arguments.out} is the input file itself: give another path")
    if arguments.out is not None and job == "--pairs":
        if arguments.out.suffix != ".json":
            raise UserError(
                f"--out {arguments.out} must end with .json: the tables get the same name with .md and .csv"
            )
        for suffix in (".md", ".csv", ".pairs.csv"):
            if (beside := arguments.out.with_suffix(suffix)).resolve() in inputs:
                raise UserError(f"--out {arguments.out} would overwrite the input file {beside}: give another name")
            if beside.is_dir():
                raise UserError(
                    f"--out {arguments.out} would also write {beside}, which is a folder: give another name"
                )
    if arguments.out is not None and arguments.out.is_dir():
        raise UserError(f"--out {arguments.out} is a folder: give the name of a file")
    if arguments.batch_tokens < 1:
        raise UserError(f"--batch-tokens {arguments.batch_tokens} must be 1 or more")
    if arguments.weight is not None and not 0 <= arguments.weight < math.inf:
        raise UserError(f"--lambda {arguments.weight} must be a number from 0 on")
