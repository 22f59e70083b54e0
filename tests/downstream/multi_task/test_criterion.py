"""The objective of several tasks: gradients by hand, a float64 loop over rows and tasks, and fairseq's own criterion."""

import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fairseq.criterions.sentence_prediction import SentencePredictionConfig, SentencePredictionCriterion
from fairseq.logging import metrics
from fine_tuning_tasks import set_up
from scipy.stats import spearmanr
from sklearn.metrics import accuracy_score
from synthetic_glue import write_glue
from torch import tensor

from amos_fairseq.checkpoints.read import load_checkpoint
from amos_fairseq.downstream.model import TEXT_HEAD, TextModel
from amos_fairseq.downstream.multi_task.task import MultiTaskCriterion, MultiTaskModel
from amos_fairseq.downstream.texts.scores import average_score
from amos_fairseq.downstream.texts.task import text_loss


def gradient(kind, logits, labels, *args):
    logits = logits.clone().requires_grad_()
    loss = text_loss(kind, logits, labels, *args)
    loss.backward()
    return loss.item(), logits.grad


def test_numbers_and_labels_by_hand():
    """A score of 3 and a teacher's 1 with lambda = 0.25 make 1.5; divided by the range, 5."""
    labels = {"target": tensor([3.0]).double(), "teacher": tensor([[1.0]]).double()}
    loss, found = gradient("number", tensor([[4.0]]), labels, 5.0, 0.25)
    assert (loss, found.item()) == (pytest.approx((2.5 / 5) ** 2), pytest.approx(2 * 2.5 / 25))
    labels = {"target": tensor([[True, False]]), "teacher": tensor([[0.5, 0.1]]).double()}
    logits = tensor([[0.3, -2.0]])
    loss, found = gradient("labels", logits, labels, 1.0, 0.25)
    q, p = np.array([0.25 + 0.75 * 0.5, 0.75 * 0.1]), 1 / (1 + np.exp(-logits[0].double().numpy()))
    assert loss == pytest.approx(-(q * np.log(p) + (1 - q) * np.log(1 - p)).mean(), rel=1e-6)
    np.testing.assert_allclose(found[0].numpy(), (p - q) / 2, atol=1e-6)


@pytest.fixture(scope="module")
def data(start, tmp_path_factory):
    directory = tmp_path_factory.mktemp("data")
    rows = {"train": 12, "valid": 9}
    write_glue(directory, start, "RTE", ["entailment", "not_entailment"], rows, pair=True)
    write_glue(directory, start, "CoLA", ["0", "1"], {"train": 30, "valid": 11}, pair=False)
    write_glue(directory, start, "STS-B", [], rows, pair=True)
    labels = directory / "STS-B" / "label" / "train.label"
    labels.write_text("".join(f"{float(line) + 1}\n" for line in labels.read_text().split()))  # the smallest is not 0
    return directory


def make(start, data, *names, teacher=None, **settings):
    """The task with its datasets, and an untrained model with its heads."""
    given = {"tokens_per_text": 80, "max_update": 0, "teacher": None if teacher is None else str(teacher)} | settings
    task = set_up("multi_task", ":".join(str(data / name) for name in names), **given)
    torch.manual_seed(1)
    loaded = load_checkpoint(start)
    model = MultiTaskModel(loaded.model.cfg, loaded.model.vocabulary)
    for each in task.text_tasks.values():
        each.record["label_column"] = "label"  # as amos classify writes it
    assert [outputs.name for outputs in task.add_head(model).values()] == [*names]
    for split in ("train", "valid"):
        task.load_dataset(split)
    return task, model


def test_a_mixed_batch_is_a_loop_over_rows_and_tasks(start, data, tmp_path):
    """In float64, each row through the head of its task alone."""
    sizes, generator = {"RTE": 12, "CoLA": 30, "STS-B": 12}, np.random.default_rng(1)
    teacher = generator.random((54, 2)).astype(np.float32)
    teacher[:42] /= teacher[:42].sum(1, keepdims=True)
    np.save(tmp_path / "teacher.npy", np.concatenate([teacher[:42].ravel(), teacher[42:, 0]]))
    task, model = make(start, data, *sizes, teacher=tmp_path / "teacher.npy", gold_weight="0.25")
    criterion, rows = MultiTaskCriterion(task), task.datasets["train"]
    criterion.gold_weight = task.gold_weight(3)
    assert criterion.gold_weight == 0.25
    batch = rows.collater([rows[index] for index in (50, 0, 13, 44, 5, 41)])
    model.eval()
    loss, num_rows, log = criterion(model, batch)
    assert num_rows == 6
    exact, expected = copy.deepcopy(model).double(), dict.fromkeys(sizes, 0.0)
    for place, row in enumerate((50, 0, 13, 44, 5, 41)):
        name = "RTE" if row < 12 else "CoLA" if row < 42 else "STS-B"
        start_of_task = {"RTE": 0, "CoLA": 12, "STS-B": 42}[name]
        tokens = batch["net_input"]["src_tokens"][place]
        states = exact.extract_features(tokens[tokens.ne(1)][None])
        head, label = exact.classification_heads[name], rows.tasks[name].targets[row - start_of_task]
        output = head.output(torch.tanh(head.dense(states[:, 0])))[0].detach().numpy()
        if name == "STS-B":
            values = rows.tasks[name].targets
            low, width = values.min(), values.max() - values.min()
            q = 0.25 * label + 0.75 * teacher[row, 0]
            expected[name] += ((low + width * output[0] - q) / width) ** 2
        else:
            q = 0.25 * np.eye(2)[label] + 0.75 * teacher[row].astype(np.float64)
            expected[name] += -(q * (output - np.log(np.exp(output).sum()))).sum()
    for name in sizes:
        assert log[f"loss_{name}"].item() == pytest.approx(expected[name], rel=1e-5)  # float32 against float64
    assert loss.item() == pytest.approx(sum(expected.values()), rel=1e-5)


def test_heads_without_rows_have_gradients_of_zero(start, data):
    """So that several ranks agree on which gradients there are."""
    task, model = make(start, data, "RTE", "CoLA")
    criterion, rows = MultiTaskCriterion(task), task.datasets["train"]
    loss, *_ = criterion(model, rows.collater([rows[0], rows[1]]))
    loss.backward()
    assert model.classification_heads["CoLA"].output.weight.grad.abs().max() == 0
    assert model.classification_heads["RTE"].output.weight.grad.abs().max() > 0


@pytest.mark.parametrize("name", ["RTE", "STS-B"])
def test_one_task_is_fairseqs_sentence_prediction(start, data, name):
    """Loss and gradients; the square of a number is divided by that of the range, and the head multiplies by the range."""
    task, model = make(start, data, name)
    rows = task.datasets["train"]
    batch = rows.collater([rows[index] for index in range(8)])
    model.eval()
    MultiTaskCriterion(task)(model, batch)[0].backward()
    scale = 1.0 if name == "RTE" else task.text_tasks[name].scale[1]
    own = {key: value.grad.clone() for key, value in model.named_parameters()}
    state = {key.replace(f".{name}.", f".{TEXT_HEAD}."): value for key, value in model.state_dict().items()}
    model = TextModel(model.cfg, model.vocabulary)
    model.register_heads_of(state)
    model.eval().load_state_dict(state)
    is_number = name == "STS-B"
    cfg = SentencePredictionConfig(classification_head_name=TEXT_HEAD, regression_target=is_number)
    stock = SentencePredictionCriterion(cfg, SimpleNamespace(label_dictionary=None))
    net_input = {"src_tokens": batch["net_input"]["src_tokens"]}
    sample = {"net_input": net_input, "target": batch["labels"][name]["target"], "ntokens": 1}
    if is_number:
        sample["target"] = sample["target"].float()
    stock(model, sample)[0].backward()
    for key, value in model.named_parameters():
        found = own[key.replace(TEXT_HEAD, name)]
        torch.testing.assert_close(found * scale**2, value.grad, rtol=1e-4, atol=1e-6 * scale**2)  # float32


def test_scores_of_validation_are_those_of_all_rows(start, data):
    """In batches of 4, whose first ones have no row of two of the tasks; beside scikit-learn and scipy."""
    task, model = make(start, data, "RTE", "CoLA", "STS-B")
    criterion, rows = MultiTaskCriterion(task), task.datasets["valid"]
    for name in ("STS-B", "RTE", "CoLA"):
        torch.nn.init.normal_(model.classification_heads[name].output.weight)
    model.eval()
    with metrics.aggregate(new_root=True) as aggregated:
        for first in range(0, len(rows), 4):
            batch = rows.collater([rows[index] for index in range(first, min(first + 4, len(rows)))])
            with torch.no_grad():
                _, _, log = criterion(model, batch)
            log = {name: v.item() if torch.is_tensor(v) and v.numel() == 1 else v for name, v in log.items()}
            criterion.reduce_metrics([log])
            aggregated.get_smoothed_values()  # as a progress bar reads them
    values = aggregated.get_smoothed_values()
    expected = {}
    for name, score in (("RTE", accuracy_score), ("STS-B", lambda gold, found: spearmanr(gold, found)[0])):
        own = rows.tasks[name]
        first = int(rows.starts[list(rows.tasks).index(name)])
        batch = rows.collater([rows[first + index] for index in range(len(own))])
        with torch.no_grad():
            logits = model(**batch["net_input"])[name]
        found = logits.argmax(1).numpy() if name == "RTE" else logits[:, 0].numpy()
        expected[name] = 100 * score(own.targets, found)
    assert values["accuracy_RTE"] == pytest.approx(expected["RTE"], abs=1e-3)
    assert values["spearman_STS-B"] == pytest.approx(expected["STS-B"], abs=1e-3)
    mean = (values["accuracy_RTE"] + values["spearman_STS-B"] + values["matthews_CoLA"]) / 3
    assert values["average"] == pytest.approx(mean, abs=1e-3)
    # Tasks of one's own do not count beside GLUE's.
    assert average_score({"RTE": 10, "mine": 50}, ["RTE"]) == 10
    assert average_score({"other": 10, "mine": 50}, []) == 30
