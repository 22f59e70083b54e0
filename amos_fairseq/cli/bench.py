"""``amos bench``: speed and memory of a pretraining step, compared with peers and with the machine's limits."""

import argparse
import dataclasses
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from amos_fairseq.cli.arguments import add_configuration, add_subcommand, import_fairseq
from amos_fairseq.errors import UserError, explain_os_errors
from amos_fairseq.files import write_text

if TYPE_CHECKING:
    from amos_fairseq.measure.configuration import BenchSettings

DESCRIPTION = """\
Measure the time of a pretraining step on synthetic text: forward, backward, gradient clipping, optimizer and statistics of
one micro-batch (dataset.batch_size sequences), run by fairseq's own trainer. Peers run in turns with it, step by step: hf is
Hugging Face's ELECTRA (for mlm, its masked language model) of the same sizes with its fastest settings, hf_naive the same
with its default settings, reference this model with model.kernels=reference. The command prints a Markdown page: tokens/s,
ratios, model FLOP/s as a share of the matrix peak measured in the same run, memory, and the share of each part. --out saves
the page and a JSON file with every step.

With --finetuning, the loop of a fine-tuning is measured instead, in rows/s with random batches and with batches of similar
length, beside a plain loop with Hugging Face's ELECTRA of the same sizes.
"""


def add_parser(subparsers: Any) -> None:
    parser = add_subcommand(subparsers, "bench", "measure the speed and memory of a pretraining step", DESCRIPTION)
    add_configuration(parser, "dataset.batch_size=16")
    add = parser.add_argument
    add(
        "--peer",
        dest="peers",
        nargs="+",
        action="extend",
        metavar="NAME",
        default=[],
        help="models to compare with: hf, hf_naive, reference (default: none)",
    )
    add(
        "--precision",
        choices=("float32", "bf16", "fp16"),
        help="dtype of the step (default: that of the recipe here)",
    )
    add("--steps", type=int, metavar="N", help="measured steps of each model (default: 20)")
    add("--warmup", type=int, metavar="N", help="unmeasured steps of each model before these (default: 5)")
    add("--threads", type=int, metavar="N", help="CPU threads (default: PyTorch's choice)")
    add("--device", choices=("cpu", "cuda"), help="device to measure on (default: cuda if there is a GPU, else cpu)")
    add("--compile", action="store_true", help="also measure each model under torch.compile")
    add(
        "--on-paper",
        choices=("h200", "h100", "a100"),
        help="count kernels, bytes, FLOPs and memory of a step and predict the time of each part on this GPU; measures "
        "nothing and needs no GPU (default: measure)",
    )
    add(
        "--pieces",
        action="store_true",
        help="also measure attention, output layer, sampling and optimizer separately, beside the machine's limits",
    )
    add(
        "--finetuning",
        nargs="?",
        const="",
        metavar="DATA",
        help="measure fine-tuning on the directory with task.json DATA, of amos prepare glue or amos classify; without DATA on "
        "synthetic rows (default: measure pretraining)",
    )
    add("--out", metavar="DIR", help="directory for the page and the JSON file (default: only print the page)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    if arguments.on_paper is not None:
        run_on_paper(arguments)
        return
    if arguments.finetuning is not None:
        run_fine_tuning(arguments)
        return
    out = None if arguments.out is None else Path(arguments.out)
    if out is not None:
        make_directory(out)
    # PyTorch reads this when it loads its profiler, which otherwise prints its start and end on stderr.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    import_fairseq()
    from amos_fairseq.measure.bench_report import as_markdown
    from amos_fairseq.measure.contest import run_bench
    from amos_fairseq.measure.measurement import print_progress

    report = run_bench(settings_of(arguments), print_progress)
    print_progress("")
    page = as_markdown(report)
    print(page, end="")
    if out is not None:
        write_file(out / f"{report.name}.md", page)
        write_file(out / f"{report.name}.json", json.dumps(report.as_json(), indent=2) + "\n")
        print(f"\n{out / report.name}.md and .json")


def run_fine_tuning(arguments: argparse.Namespace) -> None:
    is_given = {f"--{name}": getattr(arguments, name) for name in ("compile", "pieces")} | {"--peer": arguments.peers}
    refused = [flag for flag, given in is_given.items() if given]
    if refused:
        raise UserError(f"--finetuning has one peer and no parts, so {', '.join(refused)} cannot apply: leave it out")
    out = None if arguments.out is None else Path(arguments.out)
    if out is not None:
        make_directory(out)
    import_fairseq()
    from amos_fairseq.measure.configuration import choose_device
    from amos_fairseq.measure.fine_tuning import as_page, bench_fine_tuning
    from amos_fairseq.measure.measurement import print_progress

    settings = settings_of(arguments)
    speeds = bench_fine_tuning(settings, arguments.finetuning, print_progress)
    print_progress("")
    page = as_page(settings, arguments.finetuning, speeds, choose_device(settings.device))
    print(page, end="")
    if out is not None:
        write_file(out / f"{settings.recipe_name}_finetuning.md", page)


def run_on_paper(arguments: argparse.Namespace) -> None:
    names = ("out", "device", "threads", "steps", "warmup")
    is_given = {f"--{name}": getattr(arguments, name) is not None for name in names}
    is_given |= {"--peer": bool(arguments.peers), "--compile": arguments.compile, "--pieces": arguments.pieces}
    is_given["--finetuning"] = arguments.finetuning is not None
    refused = [flag for flag, given in is_given.items() if given]
    if refused:
        raise UserError(f"--on-paper measures nothing, so {', '.join(refused)} cannot apply: leave it out")
    import_fairseq()
    from amos_fairseq.measure.on_paper import as_text, predict_step

    print(as_text(predict_step(settings_of(arguments), arguments.on_paper)))


def settings_of(arguments: argparse.Namespace) -> "BenchSettings":
    """Return the settings that the command line gives; others keep their defaults."""
    from amos_fairseq.measure.configuration import BenchSettings

    given = {field.name: getattr(arguments, field.name) for field in dataclasses.fields(BenchSettings)}
    return BenchSettings(**{name: value for name, value in given.items() if value is not None})


def make_directory(path: Path) -> None:
    """Create the directory of --out before anything is measured."""
    with explain_os_errors(f"--out {path} cannot be made", ": give another directory"):
        path.mkdir(parents=True, exist_ok=True)


def write_file(path: Path, text: str) -> None:
    """Write a file of --out atomically."""
    with explain_os_errors(f"{path} cannot be written", ": make room, or give another --out"):
        write_text(path, text)
