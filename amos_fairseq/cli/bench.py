"""``amos bench``: how fast a pretraining step is here, against peers and against the machine's limits, in one run."""

import argparse
import json
import os
from pathlib import Path
from typing import Any

from amos_fairseq.cli.flops import DEFAULT_VOCABULARY
from amos_fairseq.errors import UserError

DESCRIPTION = """\
Time the pretraining step of a configuration on made-up text: forward, backward, clipping, optimizer and statistics of one
micro-batch (dataset.batch_size sequences), by fairseq's own trainer. Peers take turns with it step by step: hf and hf_naive
are Hugging Face's ELECTRA (or, for mlm, its masked language model) of the same sizes at its best and as it comes; reference
is this model with model.kernels=reference. Prints a page of Markdown: tokens/s, ratios, model FLOP/s over the matrix peak
measured in the same run, memory, and the share of each part; --out keeps it, with a JSON that also holds every step.
"""


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "bench",
        help="speed and memory of a pretraining step, against peers in the same run",
        description=DESCRIPTION,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "config",
        metavar="CONFIG",
        help="a recipe of examples/pretraining/config such as electra_small, the path of a YAML, a checkpoint, or a SAVE_DIR",
    )
    parser.add_argument(
        "--set", dest="overrides", nargs="+", action="extend", metavar="KEY=VALUE", default=[],
        help="settings to change, such as dataset.batch_size=16",
    )  # fmt: skip
    parser.add_argument(
        "--peer", dest="peers", nargs="+", action="extend", metavar="NAME", default=[],
        help="who takes turns with ours: hf, hf_naive, reference",
    )  # fmt: skip
    parser.add_argument(
        "--precision", choices=("float32", "bf16", "fp16"), default=argparse.SUPPRESS,
        help="number format of the step (default: the recipe's)",
    )  # fmt: skip
    parser.add_argument(
        "--steps", type=int, default=argparse.SUPPRESS, metavar="N", help="measured steps of each (default: 20)"
    )
    parser.add_argument(
        "--warmup", type=int, default=argparse.SUPPRESS, metavar="N", help="steps of each before them (default: 5)"
    )
    parser.add_argument(
        "--threads",
        type=int,
        metavar="N",
        default=argparse.SUPPRESS,
        help="threads of a CPU (default: PyTorch's choice)",
    )
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default=argparse.SUPPRESS, help="(default: a GPU where there is one)"
    )
    parser.add_argument(
        "--vocabulary-size", type=int, metavar="N", default=argparse.SUPPRESS,
        help="entries of the dictionary, special symbols included (default: those of the checkpoint, or of task.data "
        f"where it is given, or {DEFAULT_VOCABULARY})",
    )  # fmt: skip
    parser.add_argument("--compile", action="store_true", help="measure each once more under torch.compile")
    parser.add_argument(
        "--on-paper", choices=("h200", "a100"), default=argparse.SUPPRESS,
        help="count kernels, bytes and FLOPs of a step and predict milliseconds for each part on this GPU; nothing is measured "
        "and no GPU is needed",
    )  # fmt: skip
    parser.add_argument(
        "--pieces", action="store_true",
        help="also time attention, output layer, sampling and optimizer each by itself, beside what the machine allows",
    )  # fmt: skip
    parser.add_argument(
        "--out",
        metavar="DIR",
        default=argparse.SUPPRESS,
        help="keep the page and a JSON there, named by date and recipe",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    if hasattr(arguments, "on_paper"):
        run_on_paper(arguments)
        return
    out = Path(arguments.out) if hasattr(arguments, "out") else None
    if out is not None:
        make_directory(out)
    # PyTorch's profiler announces its start and end on stderr; it reads this when it is loaded.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    # Imported here: the models take seconds that `amos --help` need not wait.
    from amos_fairseq.bench.contest import run_bench
    from amos_fairseq.bench.measurement import print_progress
    from amos_fairseq.bench.report import as_markdown
    from amos_fairseq.bench.settings import BenchSettings

    names = ("precision", "threads", "device", "vocabulary_size", "steps", "warmup")
    given = {name: getattr(arguments, name) for name in names if hasattr(arguments, name)}
    report = run_bench(
        BenchSettings(
            config=arguments.config, overrides=arguments.overrides, peers=arguments.peers, compile=arguments.compile,
            pieces=arguments.pieces, **given,
        ),
        DEFAULT_VOCABULARY,
        print_progress,
    )  # fmt: skip
    print_progress("")
    page = as_markdown(report)
    print(page, end="")
    if out is not None:
        write(out / f"{report.name}.md", page)
        write(out / f"{report.name}.json", json.dumps(report.as_json(), indent=2) + "\n")
        print(f"\n{out / report.name}.md and .json")


def run_on_paper(arguments: argparse.Namespace) -> None:
    refused = {
        "--peer": arguments.peers, "--compile": arguments.compile, "--pieces": arguments.pieces,
        "--out": hasattr(arguments, "out"), "--device": hasattr(arguments, "device"),
        "--threads": hasattr(arguments, "threads"), "--steps": hasattr(arguments, "steps"),
        "--warmup": hasattr(arguments, "warmup"),
    }  # fmt: skip
    given = [flag for flag, is_given in refused.items() if is_given]
    if given:
        raise UserError(f"--on-paper runs nothing that {', '.join(given)} could apply to: leave it out")
    from amos_fairseq.bench.on_paper import as_text, predict
    from amos_fairseq.bench.settings import BenchSettings

    names = ("precision", "vocabulary_size")
    settings = BenchSettings(
        config=arguments.config,
        overrides=arguments.overrides,
        **{name: getattr(arguments, name) for name in names if hasattr(arguments, name)},
    )
    print(as_text(predict(settings, arguments.on_paper, DEFAULT_VOCABULARY)))


def make_directory(path: Path) -> None:
    """Before anything is measured."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {path} cannot be made ({error.strerror}): give another directory") from error


def write(path: Path, text: str) -> None:
    from amos_fairseq.files import whole_file

    try:
        with whole_file(str(path)) as unfinished:
            Path(unfinished).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror}): make room, or give another --out") from error
