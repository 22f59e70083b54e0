"""``amos probe``: train small classifiers on the frozen states of chosen layers, and compare the layers."""

import argparse
import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

from amos_fairseq.cli.arguments import add_subcommand, import_fairseq
from amos_fairseq.errors import UserError
from amos_fairseq.output.terminal import ending_in_one_line, say

if TYPE_CHECKING:
    from amos_fairseq.checkpoints.read import LoadedCheckpoint

# Far more than a computer finishes; PyTorch refuses larger numbers with its own words.
LARGEST = {"seeds": 1_000_000, "lr": 1000, "batch_size": 1_000_000_000, "updates": 1_000_000_000}
OF_PROBES = ("tasks", "layers", "seeds", "classifier", "lr", "batch_size", "updates")
DESCRIPTION = """\
Edge probing (Tenney et al., 2019; AMOS section 5.2): a classifier predicts labels of spans, such as part-of-speech tags and
dependencies, from the frozen states of one layer. A table compares the layers, as the table under AMOS "Figure 4". The features
of a layer are computed once; the text is not masked. Results are added to OUT, and the same command continues there.
"""


def add_parser(subparsers: Any) -> None:
    parser = add_subcommand(subparsers, "probe", "probe layers of a checkpoint for linguistic structure", DESCRIPTION)
    add = parser.add_argument
    add("--checkpoint", metavar="CKPT", required=True, help="checkpoint, or SAVE_DIR of a run (its last checkpoint)")
    text = "tokenizer directory of the run (default: the directory tokenizer beside the checkpoint)"
    add("--tokenizer", metavar="DIR", help=text)
    text = (
        "directory of a treebank (CoNLL-U: ...-train.conllu, -dev, -test), of CoNLL-2000 (train.txt, test.txt) or of "
    )
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
    parser.set_defaults(run=functools.partial(run, parser))


def run(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    for name, largest in LARGEST.items():
        value = getattr(arguments, name)
        if value is not None and not 0 < value <= largest:
            flag = f"--{name.replace('_', '-')}"
            raise UserError(f"{flag} {value} is out of range: give a finite number above 0, at most {largest:,}")
    say(f"reading {arguments.checkpoint} and {arguments.data}", "probe")  # the imports take seconds
    import_fairseq(arguments.checkpoint)
    import torch

    from amos_fairseq.checkpoints.encoder import check_device
    from amos_fairseq.checkpoints.read import load_checkpoint
    from amos_fairseq.probing.experiment import run_probes
    from amos_fairseq.probing.training import LEARNING_RATES, ProbeSettings

    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    check_device(device)
    loaded = load_checkpoint(arguments.checkpoint, arguments.tokenizer)
    loaded.model.to(device)
    if arguments.attention:
        compare_attention(arguments, {name: parser.get_default(name) for name in OF_PROBES}, loaded, device)
        return
    lr = arguments.lr or LEARNING_RATES[arguments.classifier]
    settings = ProbeSettings(arguments.classifier, lr, arguments.batch_size, arguments.updates)
    with ending_in_one_line("finished probes are not repeated", "probe"):
        data, tasks = prepared_tasks(arguments)
        chosen = {"parts": arguments.part, "layers": arguments.layers, "tasks": tasks}
        chosen |= {"with_baselines": arguments.baseline, "num_seeds": arguments.seeds, "device": device}
        table = run_probes(loaded, data, arguments.out, settings, **chosen)
    table.print()
    print(f"results: {arguments.out}/results.json, results.csv, table.md, probing.svg, probing.png")


def compare_attention(
    arguments: argparse.Namespace, defaults: dict[str, Any], loaded: "LoadedCheckpoint", device: str
) -> None:
    from amos_fairseq.files import explain_write_errors
    from amos_fairseq.probing.attention import probe_attention
    from amos_fairseq.probing.experiment import RANDOM_SEED
    from amos_fairseq.probing.features import default_parts, parts_of, random_weights
    from amos_fairseq.probing.targets import read_task

    for name in OF_PROBES:
        if getattr(arguments, name) != defaults[name]:
            raise UserError(f"--{name.replace('_', '-')} has no effect with --attention: leave it out")
    parts = parts_of(loaded.model)
    names = arguments.part or default_parts(parts)
    for name in names:
        if name not in parts or not parts[name].mixed_layers:
            known = ", ".join(name for name, part in parts.items() if part.mixed_layers)
            raise UserError(f"{loaded.file} has no network {name!r}: give --part with some of {known}")
    chosen = [parts[name] for name in names]
    if arguments.baseline:
        random = parts_of(random_weights(loaded.model, RANDOM_SEED).to(device))
        chosen, names = [*chosen, *(random[name] for name in names)], [*names, *(f"{name}, random" for name in names)]
    arguments.tasks = "dependencies"
    with ending_in_one_line("the command begins again", "probe"):
        data, _ = prepared_tasks(arguments)
        task = read_task(data, "dependencies")
        with explain_write_errors(arguments.out, "permit writing, or give another --out"):
            arguments.out.mkdir(parents=True, exist_ok=True)
            table = probe_attention(loaded, chosen, names, task, arguments.out, device)
    table.print()
    print(f"results: {arguments.out}/attention.json, attention.csv, attention.md, attention.svg, attention.png")


def prepared_tasks(arguments: argparse.Namespace) -> tuple[Path, str | None]:
    """Return the folder with JSON lines and the tasks; corpora in --data are converted in OUT/data first."""
    from amos_fairseq.probing.prepare import corpora_in, prepare_probing_inside
    from amos_fairseq.probing.results import RESULTS_FILE, read_probe_results
    from amos_fairseq.text.prepared_data import DATA

    data, out = arguments.data, arguments.out
    corpora = [] if any(data.glob("*/train.jsonl")) else corpora_in(data)
    if not corpora:
        return data, arguments.tasks
    has_results = (out / RESULTS_FILE).is_file()
    finished = read_probe_results(out)["settings"].get("data_sha256", {}) if has_results else {}
    tasks = None if arguments.tasks is None else [name.strip() for name in arguments.tasks.split(",")]
    tasks = prepare_probing_inside(out, corpora, tasks, lambda task: [RESULTS_FILE] if task in finished else [])
    return out / DATA / "probing", ",".join(tasks)
