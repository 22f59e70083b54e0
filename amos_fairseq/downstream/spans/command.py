"""``amos squad``: answers to questions, trained by the task ``squad``, decoded from scores of spans."""

import argparse
import dataclasses
import json
import shlex
import tempfile
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from fairseq.models import BaseFairseqModel

from amos_fairseq.checkpoints.read import load_checkpoint
from amos_fairseq.downstream.prediction import predict
from amos_fairseq.downstream.spans.dataset import (
    SquadSplit,
    SquadWindowDataset,
    Window,
    WindowLimits,
    window_of_most_context,
)
from amos_fairseq.downstream.spans.prepare import preparation, write_squad_split
from amos_fairseq.downstream.spans.task import SpanCandidates
from amos_fairseq.errors import UserError
from amos_fairseq.experiments.benchmark import Benchmark, BenchmarkTask, Session, TaskRun, find_devices, session_from
from amos_fairseq.experiments.recipes import different
from amos_fairseq.experiments.records import ConstantScores, RunResult, Summaries, best_runs, content_sha256
from amos_fairseq.experiments.table import run_and_print
from amos_fairseq.files import write_lines, write_text
from amos_fairseq.inputs.question_files import (
    MANIFEST,
    OF_CHARACTERS,
    SquadFile,
    evaluate,
    fitting_units,
    read_squad,
)
from amos_fairseq.text.prepared_data import prepared_data, read_manifest

RECIPE_TASK = "SQuAD"  # recipes do not distinguish the versions
# The head of the paper (thesis section 5.2.4); TEAMS does not name its head, nor does the thesis for its BERT.
HEAD_OF_RECIPE = {"electra": "joint", "electric": "joint"}
SPANS_PER_WINDOW = 20  # the best ones, which may be blank
# Null odds of a question without any valid span: above every threshold, and valid JSON.
NO_SPAN_ODDS = 1e9
PREDICT = "predict"  # the split of other questions


@dataclass(frozen=True)
class SquadSettings:
    """The settings that determine the result besides recipe, checkpoint and data."""

    span_head: str  # one of ``SPAN_HEADS``
    windows: WindowLimits
    max_answer_length: int = 30  # tokens (BERT's)
    score_by: str = "words"  # or characters, where these fit the dev contexts


def main(arguments: argparse.Namespace) -> None:
    if arguments.predict is not None:
        file, out = read_squad(arguments.predict, labeled=False), Path(arguments.out)
        decoded = answer_questions(file, Path(arguments.checkpoint), find_devices(arguments.cpu)[0])
        write_lines(out, answer_lines(out.suffix.lower(), file, decoded))
        without = sum(not answer.text for answer in decoded.values())
        print(f"{out}: {len(decoded):,} questions, {without:,} of them without an answer")
        return
    session = session_from(arguments)
    settings = read_settings(arguments, session.checkpoint.max_positions)
    if settings.span_head == "joint":
        print(f"{Squad.name}: no class of Hugging Face has the joint head; --span-head independent can be exported")
    if arguments.data is not None:
        data = Path(arguments.data)
    else:
        with session.preparing() as tokenizer:
            data = prepared_data(session.out, "squad", *preparation(arguments.train, arguments.dev, tokenizer))
    run_and_print(open_squad(session, data, settings))


def read_settings(arguments: argparse.Namespace, max_positions: int) -> SquadSettings:
    """Return the settings of windows, head and decoding for an encoder of ``max_positions``."""
    usual = WindowLimits()
    tokens = arguments.tokens_per_window or min(usual.tokens, max_positions)
    if tokens > max_positions:
        raise UserError(f"--tokens-per-window {tokens} is more than the {max_positions} tokens that the encoder takes")
    stride = arguments.doc_stride or min(usual.doc_stride, max(1, tokens // 4))
    question = arguments.max_question_length or min(usual.question, max(1, tokens // 2))
    head = arguments.span_head or HEAD_OF_RECIPE.get(arguments.recipe, "independent")
    return SquadSettings(head, WindowLimits(tokens, stride, question), arguments.max_answer_length)


def open_squad(session: Session, data: Path, settings: SquadSettings) -> "Squad":
    """Read prepared data. The dev set determines the version: 2.0 if it has questions without an answer. The recipe has the
    number of separators."""
    data = data.resolve()
    # The head reads each token.
    trials = different(dataclasses.replace(trial, pooling="first") for trial in session.recipe.trials_of(RECIPE_TASK))
    num_separators = {trial.num_separators for trial in trials}
    if len(num_separators) > 1:
        raise UserError(f"the recipe {session.recipe.name} has several num_separators for SQuAD: run them one by one")
    windows, manifest = settings.windows._replace(num_separators=num_separators.pop()), read_manifest(data / MANIFEST)
    score_by = fitting_units(SquadSplit(data, "valid").texts)
    settings = dataclasses.replace(settings, windows=windows, score_by=score_by)
    session.checkpoint.check_tokenizer(data / "tokenizer")
    name = "SQuAD2.0" if manifest["splits"]["valid"]["impossible"] else "SQuAD1.1"
    examples = SquadWindowDataset(SquadSplit(data, "train"), limits=windows, training=True)
    sha256 = content_sha256([manifest, dataclasses.asdict(settings)])
    notes = [f"{name}: {note}" for note in manifest["splits"]["valid"]["notes"]]
    notes += [f"{name}: {OF_CHARACTERS}"] if score_by == "characters" else []
    task = BenchmarkTask(name, len(examples), "f1", sha256, trials, tuple(notes))
    return Squad(session, data, {name: task}, settings)


@dataclass
class Squad(Benchmark):
    settings: SquadSettings

    name = trained_as = "squad"
    unit = "questions"
    title = "SQuAD dev"
    # Scores of write_answers; version 1.1 has only the first two.
    columns = {"em": "EM", "f1": "F1", "has_ans_f1": "HasAns F1", "no_ans_em": "NoAns EM", "best_em": "best EM"}

    def train_flags(self, run: TaskRun) -> list[str]:
        windows = self.settings.windows
        flags = [str(self.data), "--span-head", self.settings.span_head]
        flags += ["--tokens-per-window", str(windows.tokens), "--doc-stride", str(windows.doc_stride)]
        flags += ["--max-question-length", str(windows.question)]
        return [*flags, *([] if run.task.scores_best else ["--disable-validation"])]

    def more_settings(self, task: str, seed: int) -> dict[str, Any]:
        """Return what --predict needs and the checkpoint does not know."""
        return {"max_answer_length": self.settings.max_answer_length}

    def evaluate(self, task: str, checkpoint: Path, device: str, stop: threading.Event) -> dict[str, float]:
        split = SquadSplit(self.data, "valid")
        windows = SquadWindowDataset(split, limits=self.settings.windows)
        decoded = predict_answers(load_checkpoint(checkpoint).model, windows, device, self.settings, stop)
        return write_answers(checkpoint.parent, split, decoded, self.settings.score_by)

    def constants(self) -> dict[str, ConstantScores]:
        """Of version 2.0: no question is answered, so that those without an answer are right."""
        examples = SquadSplit(self.data, "valid").examples
        share = 100 * sum(example.is_impossible for example in examples) / len(examples)
        scores = {"em": share, "f1": share, "has_ans_f1": 0.0, "no_ans_em": 100.0, "best_em": share}
        return {task: ConstantScores(len(examples), {"no answer": scores}) for task in self.tasks if task == "SQuAD2.0"}

    def write_more(self, summaries: Summaries, stop: threading.Event) -> tuple[Sequence[Path], Sequence[str]]:
        out = shlex.quote(str(self.session.out))
        return (), (f"to answer other questions: amos squad --checkpoint {out} --predict FILE --out ANSWERS.jsonl",)

    def notes(self, results: Sequence[RunResult], summaries: Summaries) -> Iterator[str]:
        windows = self.settings.windows
        yield (
            f"{self.settings.span_head} head; windows of {windows.tokens} tokens, stride {windows.doc_stride}, questions of "
            f"up to {windows.question} tokens, {windows.num_separators} </s> after them; answers of up to "
            f"{self.settings.max_answer_length} tokens"
        )
        if "SQuAD2.0" in summaries:
            yield (
                "SQuAD2.0: the threshold for no answer is the one with the best F1 on the same dev set; best EM has its own"
            )


class ScoredSpan(NamedTuple):
    """``first`` and ``last`` are token indices of the whole context."""

    score: float
    first: int
    last: int


class Decoded(NamedTuple):
    """The answer to a question."""

    text: str  # the best one; empty without a valid span
    null_odds: float  # higher if no answer is more likely
    start: int | None = None  # its first character in the context

    def unless_above(self, threshold: float) -> "Decoded":
        """Return no answer if the odds of none are above the threshold."""
        return Decoded("", self.null_odds) if self.null_odds > threshold else self


def predict_answers(
    model: BaseFairseqModel,
    windows: SquadWindowDataset,
    device: str,
    settings: SquadSettings,
    stop: threading.Event | None = None,
) -> dict[str, Decoded]:
    """Predict the answers to every question of a split, by question id, in its order; ``model`` is in eval mode."""
    ranges: dict[int, list[tuple[int, int]]] = defaultdict(list)  # of the windows of each example
    for index in range(len(windows)):
        window = windows.window(index)
        ranges[window.example].append((window.begin, window.end))
    owners = {example: window_of_most_context(bounds) for example, bounds in ranges.items()}

    def inputs(indices: list[int]) -> dict[str, Any]:
        return windows.collater([windows[index] for index in indices])["net_input"] | {"span_targets": None}

    def read_out(output: SpanCandidates, indices: list[int]) -> Iterator[tuple[list[ScoredSpan], float]]:
        arrays = (values.cpu().numpy() for values in output)
        for index, starts, ends, scores, null_score in zip(indices, *arrays, strict=True):
            window = windows.window(index)
            owner = owners[window.example]
            yield spans_of_window(starts, ends, scores, window, owner, settings), float(null_score)

    spans: dict[int, list[ScoredSpan]] = defaultdict(list)
    null_scores: dict[int, list[float]] = defaultdict(list)
    for index, (best, null_score) in enumerate(predict(model, windows.sizes, inputs, read_out, device, stop)):
        example = windows.window(index).example
        spans[example] += best
        null_scores[example].append(null_score)
    decoded, squad, compares_null = {}, windows.squad, model.span_head.compares_null
    for index, example in enumerate(squad.examples):
        text, offsets = squad.texts[example.context], squad.offsets(example.context)
        decoded[example.id] = decode_question(spans[index], null_scores[index], text, offsets, compares_null)
    return decoded


def spans_of_window(
    starts: np.ndarray, ends: np.ndarray, scores: np.ndarray, window: Window, owner: np.ndarray, settings: SquadSettings
) -> list[ScoredSpan]:
    """Return the valid spans of a window, best first, at most :data:`SPANS_PER_WINDOW`: inside the context, and not too long.

    A span counts only in the window in which its first token has most context (``owner``, [context tokens]), so that no span is
    scored twice. ``starts``, ``ends``: [C] positions in the window; ``scores``: [C], -inf for spans that the head excludes.
    """
    first, last = starts - window.offset + window.begin, ends - window.offset + window.begin
    valid = np.isfinite(scores) & (first >= window.begin) & (last < window.end)
    valid &= (last >= first) & (last - first < settings.max_answer_length)
    candidates = np.flatnonzero(valid)
    candidates = candidates[owner[first[candidates]] == window.number]
    best = candidates[np.argsort(-scores[candidates], kind="stable")][:SPANS_PER_WINDOW]
    return [ScoredSpan(float(scores[i]), int(first[i]), int(last[i])) for i in best]


def decode_question(
    spans: Iterable[ScoredSpan],
    null_scores: Sequence[float],
    context: str,
    characters: tuple[np.ndarray, np.ndarray],
    compares_null: bool,
) -> Decoded:
    """Select the answer to one question from the spans of all its windows.

    The lowest null score counts, since one window with an answer is enough. With ``compares_null`` null scores have the scale
    of spans (independent head), and the odds are the difference to the best span. ``characters``: begin and end of each token.
    """
    null_odds = min(null_scores)
    for span in sorted(spans, key=lambda span: -span.score):
        start = int(characters[0][span.first])
        found = context[start : characters[1][span.last]]
        if text := found.strip():
            return Decoded(text, null_odds - span.score if compares_null else null_odds, start + found.index(text))
    return Decoded("", NO_SPAN_ODDS)


def write_answers(
    directory: Path, split: SquadSplit, decoded: dict[str, Decoded], score_by: str = "words"
) -> dict[str, float]:
    """Score the answers, write all files into ``directory``, and return the content of ``scores.json``.

    If the split has questions without an answer, the threshold of the null odds is chosen on it: the one that gives the
    best F1 in the official script's search, on the scale of ``null_odds.json``. Above it, the prediction is "".
    """
    golds = {example.id: [answer.text for answer in example.answers] for example in split.examples}
    answers = {name: answer.text for name, answer in decoded.items()}
    files: dict[str, Any] = {}
    scores: dict[str, float] = {}
    has_impossible = any(example.is_impossible for example in split.examples)
    if has_impossible:
        odds = {name: answer.null_odds for name, answer in decoded.items()}
        best = evaluate(golds, answers, odds, units=score_by)
        threshold = best["best_f1_thresh"]
        if threshold not in odds.values():
            # The search starts with no question answered and reports threshold 0 for it, which is right only for
            # probabilities. On our scale, a threshold below all odds has that meaning.
            threshold = min(odds.values()) - 1
        scores = {"best_em": best["best_exact"], "null_threshold": threshold}
        answers = {name: answer.unless_above(threshold).text for name, answer in decoded.items()}
        files["null_odds"] = odds
    official = evaluate(golds, answers, units=score_by)
    scores = {"em": official["exact"], "f1": official["f1"]} | scores
    if has_impossible:
        scores |= {"has_ans_em": official.get("HasAns_exact", 0.0), "has_ans_f1": official.get("HasAns_f1", 0.0)}
        scores["no_ans_em"] = official["NoAns_exact"]
    scores = {name: float(value) for name, value in scores.items()}
    for name, content in (files | {"predictions": answers, "scores": scores}).items():
        write_text(directory / f"{name}.json", official_text(content))
    return scores


def official_text(content: Any) -> str:
    return json.dumps(content, ensure_ascii=False, indent=1) + "\n"


def answer_questions(file: SquadFile, results: Path, device: str) -> dict[str, Decoded]:
    """Return the answer to each question by the best run in an output of ``amos squad``, with its threshold."""
    ((_, run),) = best_runs(results, Squad.name, "amos squad").items()
    loaded = load_checkpoint(run.checkpoint_in(results))
    lengths = (loaded.task[name] for name in ("tokens_per_window", "doc_stride", "max_question_length"))
    longest = run.settings.get("max_answer_length", SquadSettings.max_answer_length)
    settings = SquadSettings(loaded.model.span_head.kind, WindowLimits(*lengths, loaded.num_separators), longest)
    with tempfile.TemporaryDirectory() as folder:
        write_squad_split(Path(folder), PREDICT, file.paragraphs, loaded.tokenizer)
        windows = SquadWindowDataset(SquadSplit(Path(folder), PREDICT), limits=settings.windows)
        decoded = predict_answers(loaded.model, windows, device, settings)
    threshold = run.scores.get("null_threshold", NO_SPAN_ODDS)
    return {name: answer.unless_above(threshold) for name, answer in decoded.items()}


def answer_lines(suffix: str, file: SquadFile, decoded: dict[str, Decoded]) -> Iterator[str]:
    """Yield the text of ``predictions.json``, or JSON lines."""
    if suffix == ".json":
        yield official_text({name: answer.text for name, answer in decoded.items()})
        return
    for question in file.questions:
        text, null_odds, start = decoded[question.id]
        row = {"id": question.id, "question": question.text, "answer": text, "start": start, "null_odds": null_odds}
        yield json.dumps(row, ensure_ascii=False) + "\n"
