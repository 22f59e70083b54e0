"""A folder with small inputs for every command of ``amos``, and command lines that are run in it."""

import json
import random
import shlex
from pathlib import Path

from hugging_face_folders import write_model
from preparing import prepare
from saved_models import CORPUS, add_settings, write_run
from synthetic_squad import make_squad, untrained_checkpoint, write_json
from synthetic_tagging import make_sentences, prepare_tagging

from attacks.commands import run_command

SMALL_RUN = shlex.split(
    "task.tokens_per_sample=32 model.max_positions=32 model.encoder_embed_dim=32 model.encoder_ffn_embed_dim=64 "
    "dataset.batch_size=16 dataset.num_workers=0 optimization.max_update=2"
)
RECIPE = """\
defaults: {lr: 3.0e-3, epochs: 4, batch_size: 8, warmup: 0.1, dropout: 0.1, attention_dropout: 0.1, num_separators: 2}
tasks: {tagging: {}, parsing: {}, classification: {}, multi: {}, RTE: {}}
"""
RESULTS = "results"  # the folder of finished results
# Each writes to the folder out alone, and takes seconds.
_COMMANDS = {
    "recipes": "amos_tiny",
    "flops": "run",
    "score": "mlm text.txt --out out/scores.tsv",
    "report": "run results/classify results/parse results/probe --text text.txt --sentence 'the quick ± fox' "
    "--figures out/figures --out out/page.html",
    "import": "bert out/model.pt --arch amos_tiny",
    "export": "run out/folder --no-check",
    "prepare": "text.txt --out out/corpus --vocab-size 120 --workers 1",
    "probe": "--checkpoint run --data probing --out out/probe --part generator --layers 1 --updates 4 --batch-size 16 "
    "--seeds 2",
    "tag": "--checkpoint start/checkpoint_last.pt --data labels/data --out out/tag --recipe recipe.yaml --seeds 1 --cpu",
}
COMMANDS = {name: shlex.split(arguments) for name, arguments in _COMMANDS.items()}
_START = " --checkpoint start/checkpoint_last.pt --recipe recipe.yaml --seeds 1 --cpu --out out/"
UNLABELED = ["--unlabeled", "trees.conllu", "--views", "full"]
_TRAINING = {
    "tag": "--train trees.conllu --dev trees.conllu",
    "parse": "--train trees.conllu --dev trees.conllu --unlabeled trees.conllu --views full,forward-forward",
    "glue": "--data glue --tasks RTE --write-train",
    "classify": "--train table.tsv --dev table.tsv",
}
TRAINING = {name: shlex.split(f"{arguments}{_START}{name}") for name, arguments in _TRAINING.items()}
PREDICT = {
    "parse": shlex.split(f"--checkpoint {RESULTS}/parse --predict trees.conllu --out out/x.conllu"),
    "classify": shlex.split(f"--checkpoint {RESULTS}/classify --predict table.tsv --out out/x.tsv"),
}


def write_workplace(folder: Path) -> Path:
    """Write the folder; its results take a minute."""
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
    write_probing_data(folder / "probing", draw)
    labels = prepare_tagging(folder / "labels")
    untrained_checkpoint(folder / "start", labels, 40)
    (folder / "recipe.yaml").write_text(RECIPE)
    write_raw_files(folder)
    trees = folder / "trees.conllu"
    prepare("tagging")([trees, trees, folder / "labels" / "tokenizer", folder / "pos"])
    write_results(folder)
    return folder


def write_metrics(file: Path) -> None:
    values = {"mlm_loss_1": 5.0, "mlm_loss_2": 4.0, "mixture_1": 0.4, "rtd_recall": 0.2, "unigram_entropy": 4.5}
    values |= {"wps": 9.0, "lr": 0.1, "loss": None}
    moments = [(update, split) for update in (10, 20, 30) for split in ("train", "valid")]
    records = [{"split": split, "update": update, "epoch": update / 10, **values} for update, split in moments]
    file.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


def write_raw_files(folder: Path) -> None:
    """Tables, trees, questions and GLUE's RTE that a tiny model can be fine-tuned on."""
    sentences = make_sentences(40)
    texts = [" ".join(word for word, _, _ in rows) for rows in sentences]
    labels = ["name" if "Anna" in text else "other" for text in texts]
    lines = [f"{text}\t{label}\n" for text, label in zip(texts, labels, strict=True)]
    (folder / "table.tsv").write_text("text\tlabel\n" + "".join(lines), encoding="utf-8")
    rows = [f"{i}\t{text}\t{text}\t{'not_' * (i % 2)}entailment\n" for i, text in enumerate(texts)]
    (folder / "glue" / "RTE").mkdir(parents=True)
    for split in ("train", "dev"):
        content = "index\tsentence1\tsentence2\tlabel\n" + "".join(rows)
        (folder / "glue" / "RTE" / f"{split}.tsv").write_text(content, encoding="utf-8")
    trees = ""
    for words in sentences:
        for number, (word, tag, _) in enumerate(words, start=1):
            relation = ("root", "det", "obj")[min(number - 1, 1 + number % 2)]
            trees += f"{number}\t{word}\t_\t{tag}\t_\t_\t{number - 1}\t{relation}\t_\t_\n"
        trees += "\n"
    (folder / "trees.conllu").write_text(trees, encoding="utf-8")
    write_json(folder / "squad.json", make_squad(paragraphs=4))


def write_results(folder: Path) -> None:
    """Results of ``amos classify``, ``parse`` and ``probe``, with their own commands."""
    commands = {"classify": TRAINING["classify"], "parse": TRAINING["parse"], "probe": COMMANDS["probe"]}
    for name, arguments in commands.items():
        arguments = [part.replace(f"out/{name}", f"{RESULTS}/{name}") for part in arguments]
        code, text = run_command("amos_start", [name, *arguments], folder)
        assert code == 0, text[-3000:]


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
