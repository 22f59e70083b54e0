"""A small SQuAD in the official layout, which a tiny model can memorize, and a checkpoint to fine-tune on it."""

import json
import random
from pathlib import Path
from typing import Any

from preparing import prepare

from amos_fairseq.hugging_face.import_folder import Imported, build_model, configuration, write
from amos_fairseq.text.tokenization import load_tokenizer
from amos_fairseq.text.vocabulary import learn_tokenizer

SYLLABLES = ["ba", "ke", "li", "mo", "nu", "ta", "re", "sí", "on", "ﬁ"]
COLOURS = ["red", "deep blue", "green", "grey (dark)", "1910s", "snow☃white", "the black", "中国"]


def word(generator: random.Random) -> str:
    return "".join(generator.choices(SYLLABLES, k=generator.randint(2, 4))).capitalize()


def paragraph(generator: random.Random, number: int, facts: int) -> dict[str, Any]:
    """Facts "The colour of NAME is COLOUR." and four questions for the colours; the last asks for an absent name."""
    names = [word(generator) for _ in range(facts)]
    context, positions = "", []
    for name in names:
        colour = generator.choice(COLOURS)
        context += f"The colour of {name}, they say,\u00a0is "
        positions.append((len(context), colour))
        context += f"{colour}.  "
    qas = []
    for index, fact in enumerate(generator.sample(range(facts), 4)):
        start, colour = positions[fact]
        impossible = index % 4 == 3
        name = word(generator) + "x" if impossible else names[fact]
        answers = [] if impossible else [{"text": colour, "answer_start": start}] * 2
        asked = {"id": f"p{number}q{index}", "question": f"What is the colour of {name}?"}
        qas.append(asked | {"answers": answers, "is_impossible": impossible})
    return {"context": context.rstrip(), "qas": qas}


def make_squad(seed: int = 1, facts: int = 6) -> dict[str, Any]:
    """Version 2.0 with 40 questions, 10 of them without an answer."""
    generator = random.Random(seed)
    contents = [paragraph(generator, number, facts) for number in range(10)]
    return {"version": "v2.0", "data": [{"title": "Synthetic", "paragraphs": contents}]}


def without_impossible(squad: dict[str, Any]) -> dict[str, Any]:
    """The same as version 1.1: answerable questions only, no flag."""
    copy = json.loads(json.dumps(squad))
    for content in copy["data"][0]["paragraphs"]:
        content["qas"] = [{k: q[k] for k in ("id", "question", "answers")} for q in content["qas"] if q["answers"]]
    return copy | {"version": "1.1"}


def write_json(path: Path, content: Any) -> Path:
    path.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    return path


def text_of(squad: dict[str, Any]) -> list[str]:
    """Every context and question, a line each."""
    contents = [content for article in squad["data"] for content in article["paragraphs"]]
    return [line for content in contents for line in (content["context"], *(q["question"] for q in content["qas"]))]


def prepare_squad(directory: Path, squad: dict[str, Any], *flags: str) -> Path:
    """``directory/data``, prepared with the same questions to train and to evaluate on; its tokenizer is learned from them."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "text.txt").write_text("\n".join(text_of(squad)) + "\n", encoding="utf-8")
    learn_tokenizer(directory / "text.txt", 150, cased=False).save(directory / "tokenizer")
    source = str(write_json(directory / "squad.json", squad))
    prepare("squad")([source, source, str(directory / "tokenizer"), str(directory / "data"), *flags])
    return directory / "data"


def untrained_checkpoint(directory: Path, data: Path, max_positions: int = 64) -> Path:
    """Write a SAVE_DIR with an untrained small AMOS model and the tokenizer of ``data``; return the checkpoint."""
    settings = {"encoder_layers": 2, "encoder_embed_dim": 64, "encoder_ffn_embed_dim": 128}
    settings |= {"encoder_attention_heads": 2, "max_positions": max_positions}
    settings |= {"generator_depths": "1,2", "linear_init_std": 0.1}
    config = configuration("amos_tiny", settings, "synthetic")
    tokenizer = load_tokenizer(data / "tokenizer")
    model = build_model(config, tokenizer)
    write(Imported(config, model, tokenizer, "synthetic", [], [], []), directory / "checkpoint_last.pt")
    return directory / "checkpoint_last.pt"
