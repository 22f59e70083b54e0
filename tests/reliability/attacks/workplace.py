"""A folder with small inputs for every command of ``amos``, and command lines that are run in it."""

import json
import random
import shlex
from pathlib import Path

from benchmark_summary import write_summary, write_tagging
from hugging_face_folders import write_model
from saved_models import CORPUS, UPDATES, add_settings, write_run
from synthetic_squad import untrained_checkpoint
from synthetic_tagging import prepare_tagging

from amos_fairseq.probing.results import ProbeResult, ProbeResults

SMALL_RUN = shlex.split(
    "task.tokens_per_sample=32 model.max_positions=32 model.encoder_embed_dim=32 model.encoder_ffn_embed_dim=64 "
    "dataset.batch_size=16 dataset.num_workers=0 optimization.max_update=2"
)
RECIPE = """\
defaults: {lr: 3.0e-3, epochs: 4, batch_size: 8, warmup: 0.1, dropout: 0.1, attention_dropout: 0.1, num_separators: 2}
tasks: {tagging: {}}
"""
# Each writes to the folder out alone, and takes seconds.
_COMMANDS = {
    "recipes": "amos_tiny",
    "flops": "run",
    "inspect": "run --text 'the quick ± fox' --html out/page.html",
    "score": "mlm text.txt --out out/scores.tsv",
    "plot": "run --out out/plots",
    "report": "run --glue glue --tag tag --probe probe --text text.txt --sentence 'the fox' --masked-tokens 50 "
    "--out out/page.html",
    "import": "bert out/model.pt --arch amos_tiny",
    "export": "run out/folder --no-check",
    "prepare": "text.txt --out out/corpus --vocab-size 60 --workers 1",
    "probe": "--checkpoint run --data probing --out out/probe --part generator --layers 1 --updates 4 --batch-size 16 "
    "--seeds 2",
    "tag": "--checkpoint start/checkpoint_last.pt --data labels/data --out out/tag --recipe recipe.yaml --seeds 1 --cpu",
}
COMMANDS = {name: shlex.split(arguments) for name, arguments in _COMMANDS.items()}


def write_workplace(folder: Path) -> Path:
    """Write the folder; nothing in it takes long to make, and nothing is trained."""
    draw = random.Random(0)
    folder.mkdir()
    (folder / "out").mkdir()
    for name, objective in (("run", "amos"), ("mlm", "mlm")):
        write_run(folder / name, objective, task={"tokens_per_sample": 20})
    add_settings(folder / "run", "amos_tiny")
    write_metrics(folder / "run" / "metrics.jsonl")
    write_model(folder / "bert", "bert", "BertModel")
    paragraphs = [" ".join(draw.choices(" ".join(CORPUS).split(), k=20)) for _ in range(60)]
    (folder / "text.txt").write_text("\n\n".join(paragraphs) + "\n", encoding="utf-8")
    write_summaries(folder)
    write_probing_data(folder / "probing", draw)
    labels = prepare_tagging(folder / "labels")
    untrained_checkpoint(folder / "start", labels, 40)
    (folder / "recipe.yaml").write_text(RECIPE)
    return folder


def write_metrics(file: Path) -> None:
    values = {"mlm_loss_1": 5.0, "mlm_loss_2": 4.0, "mixture_1": 0.4, "rtd_recall": 0.2, "unigram_entropy": 4.5}
    values |= {"wps": 9.0, "lr": 0.1, "loss": None}
    records = [
        {"split": split, "update": update, "epoch": update / 10, **values}
        for update in (10, 20, 30)
        for split in ("train", "valid")
    ]
    file.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


def write_summaries(folder: Path) -> None:
    """Results of ``amos glue``, ``squad``, ``tag`` and ``probe``."""
    run = folder / "run"
    for benchmark in ("glue", "squad"):
        write_summary(folder / "glue", UPDATES, run, benchmark=benchmark, MNLI=70.0, CoLA=50.0)
    write_tagging(folder / "tag", UPDATES, run)
    results = [ProbeResult("pos", "generator", layer, None, 1, "micro_f1", 0.5, 9) for layer in (1, 2)]
    checkpoint = {"file": str(run / "checkpoint_last.pt"), "num_updates": UPDATES}
    (folder / "probe").mkdir()
    ProbeResults(checkpoint, {"classifier": "linear"}, results).write(folder / "probe")


def write_probing_data(folder: Path, draw: random.Random) -> None:
    words = " ".join(CORPUS[1:]).split()
    (folder / "pos").mkdir(parents=True)
    for split, size in {"train": 30, "valid": 8, "test": 9}.items():
        texts = [draw.choices(words, k=5) for _ in range(size)]
        rows = [
            {"text": " ".join(text), "targets": [{"span1": [0, 1], "label": "noun" if text[0] == "fox" else "öther"}]}
            for text in texts
        ]
        (folder / "pos" / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
