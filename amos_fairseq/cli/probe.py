"""``amos probe``: train small classifiers on the frozen states of chosen layers, and compare the layers."""

import argparse
from pathlib import Path
from typing import Any

from amos_fairseq.cli.arguments import SIZE, add_subcommand, import_fairseq, number, refuse_ranks
from amos_fairseq.errors import UserError
from amos_fairseq.output.terminal import ending_in_one_line, say

DESCRIPTION = """\
Edge probing (Tenney et al., 2019; AMOS section 5.2): a classifier predicts labels of spans, such as part-of-speech tags and
dependencies, from the frozen states of one layer. A table compares the layers, as the table under AMOS "Figure 4". The features
of a layer are computed once; the text is not masked.
"""


def add_parser(subparsers: Any) -> None:
    parser = add_subcommand(
        subparsers, "probe", "probe layers of a checkpoint for linguistic structure", DESCRIPTION, run
    )
    add = parser.add_argument
    add("--checkpoint", metavar="CKPT", required=True, help="checkpoint, or SAVE_DIR of a run (its last checkpoint)")
    text = "tokenizer directory of the run (default: the directory tokenizer beside the checkpoint)"
    add("--tokenizer", metavar="DIR", help=text)
    text = "directory that amos prepare probing wrote, or with other TASK/{train,valid,test}.jsonl"
    add("--data", metavar="DIR", type=Path, required=True, help=text)
    add("--out", metavar="OUT", type=Path, required=True, help="directory for the results, which must not exist")
    add("--part", metavar="PART", nargs="+", help="generator, discriminator or encoder (default: all)")
    text = "layers of each part, such as 4,6,8; 0 is the input of the first "
    text += "(default: the generator's depths, and the last layer of the others)"
    add("--layers", metavar="LIST", help=text)
    add("--tasks", metavar="LIST", help="tasks, separated by commas (default: all in --data)")
    add("--seeds", type=SIZE, metavar="N", default=1, help="probes per layer and task, with seeds 1 to N")
    text = "linear, as in AMOS, or mlp, with a projection to 256 and a hidden layer, as in Tenney et al."
    add("--classifier", choices=("linear", "mlp"), default="linear", help=text)
    text = "initial learning rate of Adam, divided by the square root of the width (default: 0.5; mlp: 0.01)"
    add("--lr", type=number(float, 1e-9, 1000), help=text)
    add("--updates", type=SIZE, metavar="N", default=2000, help="updates of each probe")
    add("--device", help="device to compute on, such as cpu or cuda:1 (default: a GPU if there is one, else the CPU)")


def run(arguments: argparse.Namespace) -> None:
    refuse_ranks("probe")
    if arguments.out.exists():
        raise UserError(f"--out {arguments.out} exists: give another directory")
    say(f"reading {arguments.checkpoint} and {arguments.data}", "probe")  # the imports take seconds
    from amos_fairseq.probing.tasks import read_tasks

    with ending_in_one_line("it starts again", "probe"):
        tasks = read_tasks(arguments.data, arguments.tasks)
        for task in tasks:
            say(task.describe(), "probe")
    import_fairseq(arguments.checkpoint, inputs=[arguments.tokenizer])
    import torch

    from amos_fairseq.checkpoints.encoder import check_device
    from amos_fairseq.hugging_face.import_folder import load_model
    from amos_fairseq.probing.probe import LEARNING_RATES, ProbeSettings, run_probes

    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    check_device(device)
    with ending_in_one_line("it starts again", "probe"):
        loaded = load_model(arguments.checkpoint, arguments.tokenizer)
        loaded.model.to(device)
        lr = arguments.lr or LEARNING_RATES[arguments.classifier]
        settings = ProbeSettings(arguments.classifier, lr, updates=arguments.updates)
        chosen = {"parts": arguments.part, "layers": arguments.layers}
        table = run_probes(loaded, tasks, arguments.out, settings, **chosen, num_seeds=arguments.seeds, device=device)
    table.print()
    print(f"results: {arguments.out}/results.json, table.md")
