"""Cross-view training of words: which sentences are beside the labeled ones, when, what gets a gradient, several columns."""

from collections import Counter

import numpy as np
import pytest
import torch
from fine_tuning_tasks import build_amos, epoch_batches, set_up
from synthetic_tagging import prepare_tagging

from amos_fairseq.downstream.words.task import SequenceTaggingCriterion, SequenceTaggingTask
from amos_fairseq.errors import UserError

ALL = "full,forward,backward,future,past,word_dropout"


@pytest.fixture(scope="module")
def ner(tmp_path_factory):
    """10 sentences with labels and the other 30 without."""
    return prepare_tagging(tmp_path_factory.mktemp("ner"), "--labeled", "10", "--unlabeled", "rest")


def make_task(*data, **settings) -> SequenceTaggingTask:
    given = {"tokens_per_sentence": 40, "max_update": 10, "total_num_update": 0} | settings
    task = set_up("sequence_tagging", ":".join(map(str, data)), **given)
    task.load_dataset("train")
    return task


def build(task: SequenceTaggingTask, **settings):
    torch.manual_seed(0)
    return build_amos(task, linear_init_std=0.1, **settings)


def unlabeled_of(batch: dict) -> list[tuple[int, ...]]:
    unlabeled = batch["net_input"]["unlabeled"]
    rows = zip(unlabeled["src_tokens"].tolist(), unlabeled["lengths"], strict=True)
    return [tuple(row[:length]) for row, length in rows]


def test_each_unlabeled_sentence_is_read_once_before_one_is_read_again(ner):
    """Three epochs of 10 labeled sentences read the 30 others once. Loader processes, ranks and a resume change nothing."""
    task = make_task(ner, views="full")
    dataset = task.datasets["train"]
    every = Counter(tuple(dataset.unlabeled[index]["tokens"].tolist()) for index in range(30))
    epochs = [[unlabeled_of(batch) for batch in epoch_batches(task, epoch)] for epoch in (1, 2, 3, 4)]
    assert [list(map(len, epoch)) for epoch in epochs] == [[4, 4, 2]] * 4, "as many as labeled ones"
    assert Counter(sentence for epoch in epochs[:3] for batch in epoch for sentence in batch) == every
    assert epochs[3] != epochs[0], "the next pass has another order"
    assert [unlabeled_of(batch) for batch in epoch_batches(task, 2, num_workers=2)] == epochs[1]
    # Two ranks leave out what makes no whole update, two of ten sentences: 15 epochs of 8 read each of 30 four times.
    ranks, micro = make_task(ner, views="full"), make_task(ner, views="full", update_freq=[2])
    read = Counter()
    for epoch in range(1, 16):
        parts = [epoch_batches(ranks, epoch, 2, num_shards=2, shard_id=rank) for rank in (0, 1)]
        joined = [unlabeled_of(one) + unlabeled_of(other) for one, other in zip(*parts, strict=True)]
        read.update(sentence for batch in joined for sentence in batch)
    alone = [unlabeled_of(batch) for batch in epoch_batches(micro, 15, 2)]
    assert [one + other for one, other in zip(alone[::2], alone[1::2], strict=True)] == joined
    assert read == Counter({sentence: 4 * count for sentence, count in every.items()})
    assert [unlabeled_of(batch) for batch in epoch_batches(task, 2, 4, 1)] == epochs[1][1:]


def test_batches_of_similar_lengths_have_unlabeled_sentences_of_similar_lengths(ner):
    """In an epoch the order of both by length is the same; the sentences of three epochs are still the 30."""
    task = make_task(ner, views="full", similar_lengths=True)
    dataset, read = task.datasets["train"], []
    for epoch in (1, 2, 3):
        lengths = []
        for batch in epoch_batches(task, epoch, 3):
            others = batch["net_input"]["unlabeled"]["lengths"]
            lengths += list(zip(batch["net_input"]["lengths"], others, strict=True))
            read += unlabeled_of(batch)
        assert [other for _, other in sorted(lengths)] == sorted(other for _, other in lengths)
        assert len({length for length, _ in lengths}) > 4
    assert Counter(read) == Counter(tuple(dataset.unlabeled[index]["tokens"].tolist()) for index in range(30))


def test_without_views_batches_and_model_are_those_of_tagging(ner):
    plain, viewed = make_task(ner), make_task(ner, views=ALL)
    for one, other in zip(epoch_batches(plain), epoch_batches(viewed), strict=True):
        assert "unlabeled" not in one["net_input"]
        assert torch.equal(one["target"], other["target"])
        assert torch.equal(one["net_input"]["src_tokens"], other["net_input"]["src_tokens"])
    first, second = build(plain).state_dict(), build(viewed).state_dict()
    assert not any(key.startswith("cross_views") for key in first)
    assert all(torch.equal(value, second[key]) for key, value in first.items())
    restored = build(plain)
    restored.load_state_dict(second, strict=True)  # the modules of the views are dropped
    with pytest.raises(UserError, match="--views sideways: give some of full,forward"):
        make_task(ner, views="sideways")
    with pytest.raises(UserError, match=r"--unlabeled-start is a fraction of --max-update or --total-num-update"):
        make_task(ner, views="full", max_update=0)
    with pytest.raises(UserError, match="--views train the encoder, which --freeze-encoder keeps as it is"):
        build(viewed, freeze_encoder=True)
    with pytest.raises(UserError, match="all updates have the same size"):
        epoch_batches(make_task(ner, views="full", update_freq=[1, 2]))


def test_gradients_of_the_consistency_term(ner):
    """The term leaves the head alone, reaches every other part, and does not train the teacher: without dropout, the prediction
    that it is compared with has no gradient and is that of the evaluation."""
    views = ALL.removesuffix(",word_dropout")
    task = make_task(ner, views=views, unlabeled_start=0.0)
    model, batch = build(task, dropout=0.1), epoch_batches(task)[0]
    model.train()
    task.train_step(batch, model, SequenceTaggingCriterion(task, 0.0), Optimizer(), 0)
    with_term = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    assert all(gradient.any() for gradient in with_term.values())
    model.zero_grad()
    batch["unlabeled_weight"] = 0.0
    task.train_step(batch, model, SequenceTaggingCriterion(task, 0.0), Optimizer(), 0)
    for name, parameter in model.named_parameters():
        is_view, is_head = name.startswith("cross_views."), name.startswith("word_heads.")
        assert parameter.grad.any() != is_view, name
        assert torch.equal(parameter.grad, with_term[name]) == is_head, name
    with torch.no_grad():
        output = model(**batch["net_input"])
        assert all(module.training for module in model.modules())
        model.eval()
        unlabeled = batch["net_input"]["unlabeled"]
        alone = model(unlabeled["src_tokens"], word_positions=unlabeled["word_positions"])
    is_word = unlabeled["word_positions"].ne(0)
    torch.testing.assert_close(output.fixed["ner_labels"][is_word], alone.logits["ner_labels"][is_word])


class Optimizer:
    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()


@pytest.mark.parametrize("settings", [{"max_update": 10}, {"max_update": 0, "total_num_update": 10}], ids=str)
def test_before_the_start_the_modules_of_the_views_learn_alone(ner, settings):
    """Until the fraction of all updates the gradient of any other part is that of the labeled words, and no word is dropped."""
    task = make_task(ner, views="full,forward,past,word_dropout", unlabeled_start=0.3, **settings)
    model, batch, criterion = build(task).train(), epoch_batches(task)[0], SequenceTaggingCriterion(task, 0.0)
    for update in (0, 2, 3):
        gradients = []
        for weight in (batch["unlabeled_weight"], 0.0):
            model.zero_grad()
            _, _, log = task.train_step(batch | {"unlabeled_weight": weight}, model, criterion, Optimizer(), update)
            gradients.append({name: parameter.grad.clone() for name, parameter in model.named_parameters()})
        with_term, without = gradients
        for name, gradient in with_term.items():
            learns = update == 3 or name.startswith("cross_views.")
            assert torch.equal(gradient, without[name]) != learns, (update, name)
        assert ("_kl_word_dropout" in log) == (update == 3)
        assert log.keys() >= {"_kl_full", "_kl_forward", "_kl_past"}


def test_word_dropout_alone_begins_after_the_start(ner):
    task = make_task(ner, views="word_dropout", unlabeled_start=0.3, max_update=10)
    model, batch, criterion = build(task).train(), epoch_batches(task)[0], SequenceTaggingCriterion(task, 0.0)
    for update, begins in ((2, False), (3, True)):
        loss, _, log = task.train_step(batch, model, criterion, Optimizer(), update)
        assert ("_kl_word_dropout" in log) == begins
        assert (float(loss.detach()) != float(log.get("_labeled_loss", log["loss"]))) == begins


def test_several_columns_share_unlabeled_sentences(ner, pos):
    """10 sentences of entities, 40 of parts of speech: n = 40^0.25 |D|^0.75 = 14 and 40 an epoch; each unlabeled sentence
    has predictions for both columns, and each labeled one for its own."""
    task = make_task(ner, pos, views="full,future")
    model, found = build(task).eval(), epoch_batches(task, size=9)
    assert sum(len(batch["id"]) for batch in found) == 54
    assert sum(len(batch["net_input"]["rows_of_heads"]["ner_labels"]) for batch in found) == 14
    batch = found[0]
    with torch.no_grad():
        loss, _, log = SequenceTaggingCriterion(task, label_smoothing=0.0)(model, batch)
        output = model(**batch["net_input"])
    assert output.views.keys() == output.fixed.keys() == output.logits.keys() == {"ner_labels", "pos_labels"}
    labeled, words = 0.0, 0
    for head, rows in batch["net_input"]["rows_of_heads"].items():
        part, own = batch["parts"][head], output.logits[head].double().log_softmax(-1)
        for row, place in enumerate(rows.tolist()):
            positions = batch["net_input"]["word_positions"][place]
            for word, label in enumerate(part["labels"][row][: int(positions.ne(0).sum())]):
                labeled -= float(own[row, word, label])
                words += 1
    assert words == batch["nwords"]
    assert float(log["_labeled_loss"]) == pytest.approx(labeled, rel=1e-5)
    unlabeled_words = batch["net_input"]["unlabeled"]["word_positions"].ne(0).nonzero().tolist()
    assert log["_unlabeled_words"] == len(unlabeled_words)
    divergence = 0.0
    for head, views in output.views.items():
        p = output.fixed[head].double().softmax(-1)
        for scores in views.values():
            q = scores.double().softmax(-1)
            for row, word in unlabeled_words:
                divergence += float((p[row, word] * (p[row, word] / q[row, word]).log()).sum())
    # The mean number of words of a labeled sentence of an epoch, 14 of entities and 40 of parts of speech.
    data = task.datasets["train"]
    parts = (*data.labeled.tasks.values(), data.unlabeled)
    means = [np.mean([len(rows[index]["positions"]) for index in range(len(rows))]) for rows in parts]
    weight = (14 * means[0] + 40 * means[1]) / 54 / means[2]
    assert float(loss) == pytest.approx(labeled + weight * divergence, rel=1e-4)
    assert {key for key in log if key.startswith("_count_")} >= {"_count_words/pos", "_count_right_spans/ner"}
    equal = make_task(ner, pos, sampling_exponent=0.0)
    assert equal.datasets["train"].rows_of_tasks == [40, 40]
    with pytest.raises(UserError, match="--views needs sentences without labels"):
        make_task(pos, views="full")


def test_columns_with_unlabeled_sentences_of_their_own(ner, tmp_path):
    """n = 20^0.25 |D|^0.75 = 12 and 20 sentences an epoch, in updates of 8; 25 epochs of 32 read the 30 + 20 others 16 times.
    Two ranks read what one does, and so does a resume."""
    more = prepare_tagging(tmp_path, "--column", "pos", "--labeled", "20", "--unlabeled", "rest")
    task = make_task(ner, more, views="full")
    data = task.datasets["train"]
    every = Counter(tuple(data.unlabeled[index]["tokens"].tolist()) for index in range(50))
    read = Counter()
    for epoch in range(1, 26):
        read.update(sentence for batch in epoch_batches(task, epoch, 8) for sentence in unlabeled_of(batch))
    assert read == Counter({sentence: 16 * count for sentence, count in every.items()})
    alone = epoch_batches(make_task(ner, more, views="full", update_freq=[2]), 3, 3)
    parts = [epoch_batches(task, 3, 3, num_shards=2, shard_id=rank) for rank in (0, 1)]
    for number, batch in enumerate(alone):
        other = parts[number % 2][number // 2]
        assert torch.equal(batch["id"], other["id"])
        assert unlabeled_of(batch) == unlabeled_of(other)
    expected = [unlabeled_of(batch) for batch in epoch_batches(task, 3, 6)[1:]]
    assert [unlabeled_of(batch) for batch in epoch_batches(task, 3, 6, 1)] == expected
