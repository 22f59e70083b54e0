"""Rerank n-best lists of a speech recognizer or translation system with `amos score` (Clark, thesis 2021, section 5.4.5).

    python examples/reranking.py SAVE_DIR test.json --dev dev.json --out reranked.json

A file holds the hypotheses for each utterance, and the reference; ``score`` is the recognizer's f(x | s), larger for
better texts:

    {"utterance-1": {"reference": "what was said",
                     "hypotheses": [{"text": "what was set", "score": -3.2}, {"text": "what was said", "score": -3.5}]}}

The result is argmax_x f(x | s) + lambda PLL(x), where lambda is the one of 0.05, 0.10, ..., 1.0 with the fewest word
errors on the lists of --dev (the smallest on a tie), or --lambda.

Departures, where the thesis is silent: the PLL of an empty hypothesis would be 0, above every other one, so it is the
lowest PLL of its list instead. A hypothesis that is longer than the model's limit has no PLL and is skipped; a list
without any PLL keeps the recognizer's choice.
"""

import argparse
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

LAMBDAS = tuple(step / 20 for step in range(1, 21))
Lists = Mapping[str, Mapping[str, Any]]  # the content of a file
Plls = Mapping[str, float | None]  # text -> PLL in nats; None: longer than the model's limit


def read_lists(path: Path) -> Lists:
    """Read a file of n-best lists, and check its format."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        for name, utterance in content.items():
            hypotheses = utterance["hypotheses"]
            if not isinstance(utterance["reference"], str) or not hypotheses:
                raise ValueError(f"utterance {name!r} needs a text 'reference' and at least one of 'hypotheses'")
            for each in hypotheses:
                if not isinstance(each["text"], str) or not math.isfinite(each["score"]):
                    raise ValueError(f"a hypothesis of {name!r} needs a 'text' and a finite 'score'")
        if not any(utterance["reference"].split() for utterance in content.values()):
            raise ValueError("all references are empty, so that there is no error rate")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        sys.exit(
            f"{path} is no file of n-best lists ({type(error).__name__}: {error}): see {Path(__file__).name} --help"
        )
    return content


def score_texts(checkpoint: Path, texts: Sequence[str]) -> dict[str, float | None]:
    """Return the PLL of each text, from `amos score`; one line cannot hold a line end."""
    with tempfile.TemporaryDirectory() as folder:
        file, out = Path(folder, "texts.txt"), Path(folder, "scores.tsv")
        file.write_text("".join(" ".join(text.splitlines()) + "\n" for text in texts), encoding="utf-8")
        command = [Path(sys.executable).with_name("amos"), "score", checkpoint, file, "--out", out]
        if code := subprocess.run(list(map(str, command)), stdout=subprocess.DEVNULL, check=False).returncode:
            sys.exit(code)
        rows = [row.split("\t") for row in out.read_text(encoding="utf-8").splitlines()[1:]]
    return {text: float(row[1]) if row[1] else None for text, row in zip(texts, rows, strict=True)}


def word_errors(reference: str, hypothesis: str) -> int:
    """Return the fewest substitutions, deletions and insertions of words (Levenshtein distance)."""
    expected, words = reference.split(), hypothesis.split()
    previous = list(range(len(words) + 1))
    for deletions, target in enumerate(expected, start=1):
        current = [deletions]
        for i, word in enumerate(words):
            current.append(min(previous[i] + (word != target), previous[i + 1] + 1, current[i] + 1))
        previous = current
    return previous[-1]


def best_hypothesis(hypotheses: Sequence[Mapping[str, Any]], plls: Plls, weight: float) -> int:
    """Return the index of the best hypothesis with lambda ``weight``, the first one on a tie; 0 is the recognizer's choice."""
    of_words = [plls[each["text"]] for each in hypotheses if each["text"].strip()]
    lowest = min((pll for pll in of_words if pll is not None), default=None)
    sums = {}
    for index, each in enumerate(hypotheses):
        pll = plls[each["text"]] if each["text"].strip() else lowest
        if weight == 0 or lowest is None:
            sums[index] = each["score"]
        elif pll is not None:
            sums[index] = each["score"] + weight * pll
    return max(sums, key=sums.__getitem__)


def error_rate(lists: Lists, plls: Plls, weight: float) -> float:
    """Return the word error rate in percent, over all words; insertions can take it above 100."""
    errors = words = 0
    for utterance in lists.values():
        hypotheses = utterance["hypotheses"]
        chosen = hypotheses[best_hypothesis(hypotheses, plls, weight)]["text"]
        errors += word_errors(utterance["reference"], chosen)
        words += len(utterance["reference"].split())
    return round(100 * errors / words, 4)


def rerank(lists: Lists, dev: Lists, plls: Plls, weight: float | None) -> dict[str, Any]:
    """Return lambda, the error rates before and after, and the winner of each list."""
    result: dict[str, Any] = {}
    if weight is None:
        rates = {each: error_rate(dev, plls, each) for each in LAMBDAS}
        weight = min(LAMBDAS, key=rates.__getitem__)
        result["wer_on_dev"] = {f"{each:.2f}": rate for each, rate in rates.items()}
    winners = {}
    for name, utterance in lists.items():
        index = best_hypothesis(utterance["hypotheses"], plls, weight)
        chosen = utterance["hypotheses"][index]
        winners[name] = {**chosen, "place": index + 1, "pll": plls[chosen["text"]]}
    before, after = (error_rate(lists, plls, each) for each in (0.0, weight))
    return {"lambda": weight, **result, "wer_before": before, "wer_after": after, "reranked": winners}


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, help="checkpoint or SAVE_DIR of mlm, electra or electric")
    parser.add_argument("nbest", type=Path, help="the lists to rerank")
    choice = parser.add_mutually_exclusive_group(required=True)
    choice.add_argument("--dev", type=Path, help="lists on which lambda is chosen")
    choice.add_argument("--lambda", dest="weight", type=float, help="weight of the PLL")
    parser.add_argument("--out", type=Path, help="file for the result (default: the terminal)")
    arguments = parser.parse_args(words)
    lists, dev = read_lists(arguments.nbest), {} if arguments.dev is None else read_lists(arguments.dev)
    hypotheses = [each for one in (lists, dev) for utterance in one.values() for each in utterance["hypotheses"]]
    texts = list(dict.fromkeys(each["text"] for each in hypotheses))
    plls = score_texts(arguments.checkpoint, texts)
    if left_out := [text for text in texts if plls[text] is None]:
        print(f"longer than the model's limit, and skipped: {len(left_out)} hypotheses", file=sys.stderr)
    result = json.dumps(rerank(lists, dev, plls, arguments.weight), ensure_ascii=False, indent=2)
    print(result) if arguments.out is None else arguments.out.write_text(result + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
