"""Windows over contexts against naive loops, their contents and labels."""

import json
from collections import Counter

import numpy as np
import pytest
from fairseq.data import Dictionary
from synthetic_squad import make_squad, prepare_squad

from amos_fairseq.downstream.spans.dataset import (
    SquadSplit,
    SquadWindowDataset,
    WindowLimits,
    context_ranges,
    window_of_most_context,
)

LIMITS = WindowLimits(tokens=40, doc_stride=12, question=8)


def naive_ranges(length: int, room: int, stride: int) -> list[tuple[int, int]]:
    """BERT's loop, with counters instead of a list to look back at."""
    found, start = [], 0
    while True:
        size = min(length - start, room)
        found.append((start, start + size))
        if start + size == length:
            return found
        start += min(size, stride)


def naive_owner(ranges: list[tuple[int, int]], place: int) -> int:
    """The window in which a token has most context, one window after the other."""
    best, best_score = 0, None
    for number, (begin, end) in enumerate(ranges):
        if begin <= place < end:
            score = min(place - begin, end - 1 - place) + 0.01 * (end - begin)
            if best_score is None or score > best_score:
                best, best_score = number, score
    return best


@pytest.mark.parametrize("room", [1, 5, 12, 50])
@pytest.mark.parametrize("stride", [1, 4, 12, 100])
def test_ranges_and_owners_match_a_naive_loop(room, stride):
    for length in (0, 1, 4, 5, 6, 11, 12, 13, 49, 50, 51, 137):
        ranges = context_ranges(length, room, stride)
        assert ranges == naive_ranges(length, room, stride)
        assert {place for begin, end in ranges for place in range(begin, end)} == set(range(length))
        assert window_of_most_context(ranges).tolist() == [naive_owner(ranges, place) for place in range(length)]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    squad = make_squad(facts=8)
    # One answer that is not where the file says: its question cannot be trained on.
    squad["data"][0]["paragraphs"][0]["qas"][0]["answers"] = [{"text": "red", "answer_start": 0}]
    # The first and the last word are right too, with blanks: other windows than those of the first answer contain them.
    for content in squad["data"][0]["paragraphs"][1:]:
        last = content["context"].rindex(" ")
        for question in content["qas"][:3]:
            question["answers"][1:] = [{"text": f"{content['context'][last:]}\n", "answer_start": last}]
            question["answers"].append({"text": "The ", "answer_start": 0})
    return prepare_squad(tmp_path_factory.mktemp("squad"), squad)


def naive_answers(split: SquadSplit, number: int) -> list[tuple[int, int]]:
    """First and last token of each answer of the file, compared one character after the other."""
    squad = json.loads((split.directory.parent / "squad.json").read_text(encoding="utf-8"))
    content, question = [(c, q) for c in squad["data"][0]["paragraphs"] for q in c["qas"]][number]
    starts, ends = split.offsets(split.examples[number].context)
    answers = []
    for text, begin in (answer.values() for answer in question["answers"]):
        wanted = {begin + place for place, character in enumerate(text) if not character.isspace()}
        tokens = [token for token in range(len(starts)) if wanted & set(range(starts[token], ends[token]))]
        if content["context"][begin:].strip().startswith(text.strip()):
            answers.append((tokens[0], tokens[-1]))
    return answers


@pytest.mark.parametrize("num_separators", [1, 2])
def test_every_window_holds_question_and_context(data, num_separators):
    """Tokens, labels and mask of each window, rebuilt from the files one token at a time."""
    split = SquadSplit(data, "valid")
    windows = SquadWindowDataset(split, limits=LIMITS._replace(num_separators=num_separators))
    index, found = 0, Counter()
    for number, example in enumerate(split.examples):
        question = split.questions[number].tolist()[:8]
        context, answers = split.contexts[example.context].tolist(), naive_answers(split, number)
        for begin, end in naive_ranges(len(context), 38 - num_separators - len(question), 12):
            item = windows[index]
            assert item["tokens"].tolist() == [0, *question, *[2] * num_separators, *context[begin:end], 2]
            assert len(item["tokens"]) == windows.sizes[index] <= 40
            first, count = item["context"]
            assert item["tokens"][first : first + count].tolist() == context[begin:end]
            inside = [answer for answer in answers if begin <= answer[0] and answer[1] < end]
            if inside:
                start, last = item["target"]
                assert item["tokens"][start : last + 1].tolist() == context[inside[0][0] : inside[0][1] + 1]
                assert first <= start <= last < first + count
                found[answers.index(inside[0])] += 1
            else:
                assert item["target"] == (0, 0)
            index += 1
    assert index == len(windows)
    assert all(found[place] for place in range(3))
    without_target = [windows.window(i).example for i in range(index) if windows[i]["target"] == (0, 0)]
    assert any(split.examples[number].answers for number in without_target)


def test_batches_pad_and_mask(data):
    windows = SquadWindowDataset(SquadSplit(data, "valid"), limits=LIMITS)
    shortest, longest = int(np.argmin(windows.sizes)), int(np.argmax(windows.sizes))
    assert windows.sizes[shortest] < windows.sizes[longest]
    batch = windows.collater([windows[shortest], windows[longest]])
    tokens, mask = batch["net_input"]["src_tokens"], batch["net_input"]["answer_mask"]
    assert tokens.shape == mask.shape == (2, windows.sizes[longest])
    for row, index in enumerate((shortest, longest)):
        item = windows[index]
        first, count = item["context"]
        assert mask[row].nonzero().flatten().tolist() == list(range(first, first + count))
        assert tokens[row, : len(item["tokens"])].equal(item["tokens"])
        assert tokens[row, len(item["tokens"]) :].eq(Dictionary().pad()).all()
        assert tuple(targets[row].item() for targets in batch["net_input"]["span_targets"]) == item["target"]
    assert (batch["nsentences"], batch["ntokens"]) == (2, int(windows.sizes[[shortest, longest]].sum()))
    assert all(type(batch[name]) is int for name in ("nsentences", "ntokens", "first_id"))
    assert windows.collater([]) == {}


def test_training_omits_questions_with_wrong_answers(data):
    split = SquadSplit(data, "train")
    training = SquadWindowDataset(split, limits=LIMITS, training=True)
    asked = {training.window(index).example for index in range(len(training))}
    assert split.examples[0].answers
    assert not split.examples[0].spans
    assert asked == set(range(1, len(split)))
