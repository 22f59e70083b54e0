"""Fine-tune an exported encoder to sentence embeddings, on pairs of sentences with a number that says how similar they are.

    amos export RUN FOLDER
    python examples/hugging_face/sentence_embeddings.py FOLDER --train train.tsv --dev dev.tsv --out OUT

The tables are .tsv, .csv or .jsonl, also compressed, with two columns of sentences and one of numbers (default: those of
GLUE's STS-B). OUT is a folder for ``SentenceTransformer(OUT)``. The embedding is the mean of the states of all tokens. The loss
is CoSENT: of two pairs, the one with the larger number should have the larger cosine; only the order of the numbers matters.

Before and after, it prints what the embeddings are worth: the mean cosine of sentences of different pairs, and Spearman's
correlation of cosines and numbers on the pairs of --dev. Without --train it prints this alone.
"""

import argparse
import random
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from scipy.stats import spearmanr

from amos_fairseq.errors import UserError, report_user_errors
from amos_fairseq.inputs.rows import is_missing, parse_number, read_rows

try:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.losses import CoSENTLoss
    from sentence_transformers.util import batch_to_device
except ImportError as error:
    sys.exit(f"amos_fairseq: error: {error}: pip install 'sentence-transformers>=5,<6'")

RANDOM_PAIRS = 1000

Pair = tuple[str, str, float]


def read_pairs(path: Path, texts: Sequence[str], score: str) -> list[Pair]:
    """Read the pairs of a table; raise :class:`UserError` for a missing column or a value that is no number."""
    rows = read_rows(path, texts, score, quotes=False)
    pairs = []
    for line, sentences, number in zip(rows.ids, rows.texts, rows.labels, strict=True):
        if any(map(is_missing, (*sentences, number))):
            continue
        try:
            pairs.append((*sentences, parse_number(number)))
        except ValueError as error:
            raise UserError(f"{path}, line {line}: {score}: {error}") from None
    if len(pairs) < len(rows):
        print(f"{path}: {len(rows) - len(pairs):,} pairs without a sentence or a number are left out")
    return pairs


def measure(model: SentenceTransformer, pairs: list[Pair], seed: int) -> tuple[float, float]:
    """Return the mean cosine of sentences of different pairs, and 100 times Spearman's correlation on the pairs."""
    first, second = (
        model.encode(
            [pair[side] for pair in pairs], convert_to_tensor=True, normalize_embeddings=True, show_progress_bar=False
        )
        for side in (0, 1)
    )
    draw = random.Random(seed)
    # The second sentence of another pair.
    others = [(index, draw.randrange(len(pairs) - 1)) for index in draw.choices(range(len(pairs)), k=RANDOM_PAIRS)]
    left, right = zip(*((index, other + (other >= index)) for index, other in others), strict=True)
    different = (first[list(left)] * second[list(right)]).sum(-1).mean()
    cosines = (first * second).sum(-1)
    return float(different), 100 * float(spearmanr(cosines.cpu(), [number for *_, number in pairs]).statistic)


def train(model: SentenceTransformer, pairs: list[Pair], epochs: int, batch_size: int, lr: float, seed: int) -> None:
    """Train with AdamW; the learning rate rises for a tenth of the updates and then falls to 0."""
    loss_of = CoSENTLoss(model)
    tokenize = getattr(model, "preprocess", model.tokenize)  # its name in newer versions
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    batches_per_epoch = -(-len(pairs) // batch_size)
    updates = epochs * batches_per_epoch
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / max(1, updates // 10), (updates - step) / updates)
    )
    torch.manual_seed(seed)
    draw = random.Random(seed)
    model.train()
    for epoch in range(1, epochs + 1):
        order, total = draw.sample(pairs, len(pairs)), 0.0
        for start in range(0, len(order), batch_size):
            *texts, numbers = zip(*order[start : start + batch_size], strict=True)
            features = [batch_to_device(tokenize(list(side)), model.device) for side in texts]
            loss = loss_of(features, torch.tensor(numbers, device=model.device))
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            total += loss.item()
        print(f"epoch {epoch} of {epochs}: loss {total / batches_per_epoch:.3f}", flush=True)
    model.eval()


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("folder", metavar="FOLDER", help="what amos export wrote")
    add("--train", type=Path, metavar="TABLE", help="pairs to train on (default: do not train)")
    add("--dev", type=Path, required=True, metavar="TABLE", help="pairs to measure on")
    add("--out", type=Path, metavar="OUT", help="folder to write, with --train")
    add("--text", nargs=2, default=["sentence1", "sentence2"], metavar="COLUMN", help="columns of the sentences")
    add("--label", default="score", metavar="COLUMN", help="column of the numbers")
    add("--epochs", type=int, default=4)
    add("--batch-size", type=int, default=32)
    add("--lr", type=float, default=3e-4, help="for small models; 2e-5 to 5e-5 for base")
    add("--seed", type=int, default=1)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    given = parse_arguments(arguments)
    if (given.train is None) != (given.out is None):
        raise UserError("--train and --out belong together: give both, or none to measure alone")
    if given.out is not None and given.out.exists():
        raise UserError(f"{given.out} exists: give another --out")
    if not Path(given.folder, "config.json").is_file():
        raise UserError(f"{given.folder}/config.json is missing: give a folder that amos export wrote")
    dev = read_pairs(given.dev, given.text, given.label)
    pairs = read_pairs(given.train, given.text, given.label) if given.train else []
    model = SentenceTransformer(given.folder, local_files_only=True)
    report("before" if pairs else given.folder, measure(model, dev, given.seed))
    if not pairs:
        return
    train(model, pairs, given.epochs, given.batch_size, given.lr, given.seed)
    report("after", measure(model, dev, given.seed))
    model.save(str(given.out))
    print(f"wrote {given.out}")


def report(title: str, worth: tuple[float, float]) -> None:
    print(f"{title}: mean cosine of different pairs {worth[0]:.3f}, Spearman {worth[1]:.1f}", flush=True)


if __name__ == "__main__":
    with report_user_errors():
        main()
