"""``amos probe`` and ``amos score``: what a model has learned, without fine-tuning."""

import argparse
from pathlib import Path
from typing import Any

from amos_fairseq.cli.arguments import add_checkpoint, add_subcommand, import_fairseq, refuse_given
from amos_fairseq.errors import UserError
from amos_fairseq.output.terminal import ending_in_one_line, say
from amos_fairseq.scoring import PAIR_SUFFIXES

# Far more than a computer finishes; PyTorch refuses larger numbers with its own words.
LARGEST = {"seeds": 1_000_000, "lr": 1000, "batch_size": 1_000_000_000, "updates": 1_000_000_000}
PROBE_DESCRIPTION = """\
Edge probing (Tenney et al., 2019; AMOS section 5.2): a classifier predicts labels of spans, such as part-of-speech tags and
dependencies, from the frozen states of one layer. A table compares the layers, as the table under AMOS "Figure 4". The features
of a layer are computed once; the text is not masked. Results are added to OUT, and the same command continues there.
"""


def add_probe(subparsers: Any) -> None:
    parser = add_subcommand(
        subparsers, "probe", "probe layers of a checkpoint for linguistic structure", PROBE_DESCRIPTION, run_probe
    )
    add = parser.add_argument
    add("--checkpoint", metavar="CKPT", required=True, help="checkpoint, or SAVE_DIR of a run (its last checkpoint)")
    text = "tokenizer directory of the run (default: the directory tokenizer beside the checkpoint)"
    add("--tokenizer", metavar="DIR", help=text)
    text = "directory of a treebank (CoNLL-U: ...-train.conllu, -dev, -test), of CoNLL-2000 (train.txt, test.txt), of "
    text += "SemEval-2010 task 8 (TRAIN_FILE.TXT, TEST_FILE_FULL.TXT), or with several of them; or with "
    text += "TASK/{train,valid,test}.jsonl, as amos prepare probing writes"
    add("--data", metavar="DIR", type=Path, required=True, help=text)
    text = "directory for the results; the same command continues there"
    add("--out", metavar="OUT", type=Path, required=True, help=text)
    text = "generator, discriminator, encoder, or generator_DEPTH of separate generators (default: all)"
    add("--part", metavar="PART", nargs="+", help=text)
    text = "layers of each part, such as 4,6,8; 0 is the input of the first, mix a learned mixture of all "
    text += "(default: the generator's depths, and the last layer of the others)"
    add("--layers", metavar="LIST", help=text)
    add("--tasks", metavar="LIST", help="tasks, separated by commas (default: all in --data)")
    text = "instead of probes: how often the word that an attention head attends to most is the syntactic head, in a treebank"
    add("--attention", action="store_true", help=text)
    add("--baseline", action="store_true", help="also probe random weights, and the token embeddings without any layer")
    add("--seeds", type=int, metavar="N", default=1, help="probes per layer and task, with seeds 1 to N")
    text = "linear, as in AMOS, or mlp, with a projection to 256 and a hidden layer, as in Tenney et al."
    add("--classifier", choices=("linear", "mlp"), default="linear", help=text)
    text = "initial learning rate of Adam, divided by the square root of the width (default: 0.5; mlp: 0.01)"
    add("--lr", type=float, help=text)
    add("--batch-size", type=int, metavar="N", default=1024, help="targets in a batch")
    add("--updates", type=int, metavar="N", default=2000, help="updates of each probe")
    add("--device", help="device to compute on, such as cpu or cuda:1 (default: a GPU if there is one, else the CPU)")


def run_probe(arguments: argparse.Namespace) -> None:
    if arguments.attention:
        of_probes = ("tasks", "layers", "seeds", "classifier", "lr", "batch_size", "updates")
        refuse_given(arguments, of_probes, "has no effect with --attention")
    for name, largest in LARGEST.items():
        value = getattr(arguments, name)
        if value is not None and not 0 < value <= largest:
            flag = f"--{name.replace('_', '-')}"
            raise UserError(f"{flag} {value} is out of range: give a finite number above 0, at most {largest:,}")
    say(f"reading {arguments.checkpoint} and {arguments.data}", "probe")  # the imports take seconds
    from amos_fairseq.probing.prepare import read_tasks

    with ending_in_one_line("it starts again", "probe"):
        tasks = read_tasks(arguments.data, "dependencies" if arguments.attention else arguments.tasks)
    import_fairseq(arguments.checkpoint, inputs=[arguments.tokenizer])
    import torch

    from amos_fairseq.checkpoints.encoder import check_device
    from amos_fairseq.checkpoints.read import load_checkpoint
    from amos_fairseq.probing.attention import probe_attention
    from amos_fairseq.probing.experiment import run_probes
    from amos_fairseq.probing.probe import LEARNING_RATES, ProbeSettings

    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    check_device(device)
    out, is_attention = arguments.out, arguments.attention
    with ending_in_one_line("it starts again" if is_attention else "finished probes are not repeated", "probe"):
        loaded = load_checkpoint(arguments.checkpoint, arguments.tokenizer)
        loaded.model.to(device)
        if is_attention:
            table = probe_attention(loaded, tasks[0], out, arguments.part, arguments.baseline, device)
            files = "attention.json, attention.csv, attention.md, attention.svg, attention.png"
        else:
            lr = arguments.lr or LEARNING_RATES[arguments.classifier]
            settings = ProbeSettings(arguments.classifier, lr, arguments.batch_size, arguments.updates)
            chosen = {"parts": arguments.part, "layers": arguments.layers, "with_baselines": arguments.baseline}
            table = run_probes(loaded, tasks, out, settings, **chosen, num_seeds=arguments.seeds, device=device)
            files = "results.json, results.csv, table.md, probing.svg, probing.png"
    table.print()
    print(f"results: {out}/{files}")


SCORE_DESCRIPTION = """\
Score each line of FILE with CHECKPOINT: log p of every token given all others, in nats, and their sum, the
pseudo-log-likelihood (PLL). A model of the objective electric (or a variant) needs one forward pass per line, an mlm one per
token, ELECTRA one per token for its generator and a single one for its discriminator. Electric's scores are unnormalized. A
piece that the vocabulary does not contain is scored as random characters. An empty line has PLL 0; a line longer than the
maximum input of the model has no score.

With --pairs, the command reports how often the model scores the grammatical one of two sentences higher. The score is the PLL
of an mlm or electric. Of electra, teams and amos it is the sum of log P(original) over the pieces, from one pass of the
discriminator: no probability of a sentence, but an order.
"""


def add_score(subparsers: Any) -> None:
    parser = add_subcommand(
        subparsers, "score", "score text, or minimal pairs, with a model", SCORE_DESCRIPTION, run_score
    )
    add_checkpoint(parser)
    add = parser.add_argument
    add("file", metavar="FILE", nargs="?", help="UTF-8 text, one sequence per line; - for the standard input")
    text = "tab-separated values with a header, or one JSON object per line (default: tsv)"
    add("--format", choices=("tsv", "jsonl"), help=text)
    text = "file for the scores; with --pairs NAME.json, beside which NAME.md, NAME.csv and NAME.pairs.csv are written "
    add("--out", metavar="OUT", type=Path, help=text + "(default: the terminal)")
    add("--batch-tokens", type=int, metavar="N", default=2048, help="tokens of a batch; give more on a GPU")
    add("--device", default="cpu", help="device to compute on, such as cuda or cuda:1")
    add = parser.add_argument_group("minimal pairs").add_argument
    text = "instead of FILE: JSON lines with sentence_good and sentence_bad, as in BLiMP (default: score FILE)"
    add("--pairs", metavar="F", type=Path, nargs="+", help=text)
    text = "also score by the frequencies of pieces in the text of this corpus of amos prepare (default: do not)"
    add("--corpus", metavar="DATA", type=Path, help=text)
    text = "also score by random weights in the same architecture (default: do not)"
    add("--baseline", action="store_true", help=text)


def run_score(arguments: argparse.Namespace) -> None:
    check_score(arguments)
    texts = arguments.pairs or ([] if arguments.file == "-" else [arguments.file])
    import_fairseq(arguments.checkpoint, inputs=[*texts, arguments.corpus, arguments.tokenizer])
    from amos_fairseq.checkpoints.encoder import check_device
    from amos_fairseq.checkpoints.read import load_checkpoint
    from amos_fairseq.scoring.lines import score_file
    from amos_fairseq.scoring.minimal_pairs import score_pairs
    from amos_fairseq.scoring.token_scorers import build_token_scorer

    check_device(arguments.device)
    loaded = load_checkpoint(arguments.checkpoint, arguments.tokenizer)
    loaded.model.to(arguments.device)
    out = arguments.out
    if arguments.pairs is None:
        scorer = build_token_scorer(loaded, arguments.batch_tokens)
        score_file(loaded, scorer, arguments.file, arguments.format or "tsv", out)
        if out is not None:
            print(f"scores: {out}")
        return
    table = score_pairs(loaded, arguments.pairs, arguments.batch_tokens, out, arguments.corpus, arguments.baseline)
    table.print()
    if out is not None:
        print("results: " + ", ".join(str(out.with_suffix(suffix)) for suffix in PAIR_SUFFIXES))


def check_score(arguments: argparse.Namespace) -> None:
    is_pairs, out = arguments.pairs is not None, arguments.out
    if (arguments.file is None) != is_pairs:
        arguments.parser.error("give either FILE or --pairs FILE")
    if is_pairs:
        refuse_given(arguments, ["format"], "has no effect with --pairs")
    else:
        refuse_given(arguments, ["corpus", "baseline"], "has no effect without --pairs")
    if arguments.batch_tokens < 1:
        raise UserError(f"--batch-tokens {arguments.batch_tokens} must be 1 or more")
    if out is None:
        return
    if is_pairs and out.suffix != ".json":
        raise UserError(f"--out {out} must end with .json: the tables get the same name with .md and .csv")
    inputs = [Path(path).resolve() for path in arguments.pairs or [arguments.file]]
    for path in [out.with_suffix(suffix) for suffix in PAIR_SUFFIXES] if is_pairs else [out]:
        if path.resolve() in inputs:
            raise UserError(f"--out {out} would overwrite the input file {path}: give another name")
        if path.is_dir():
            raise UserError(f"--out {out} would write {path}, which is a folder: give another name")
