"""The task ``text_classification``: its rows and targets, its head, errors, and its loss and scores by hand."""

import math
import shutil
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fairseq.logging import metrics
from fairseq.models.roberta import RobertaModel
from fine_tuning_tasks import build_amos, set_up
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import f1_score, matthews_corrcoef
from synthetic_glue import change_task
from torch import tensor

from amos_fairseq.downstream.model import TEXT_HEAD, scale_of
from amos_fairseq.downstream.texts.labeling import predict_logits
from amos_fairseq.downstream.texts.scores import calibration_error, fit_temperature
from amos_fairseq.downstream.texts.task import TextClassificationCriterion, TextClassificationTask
from amos_fairseq.errors import UserError


def make_task(directory, **settings) -> TextClassificationTask:
    return set_up("text_classification", directory, tokens_per_text=16, **settings)


def test_a_regression_is_scaled(data, tmp_path):
    """The output is mean + deviation * layer; the scale is in the checkpoint, and that of another task is not loaded."""
    shutil.copytree(data / "STS-B", tmp_path / "STS-B")
    change_task(tmp_path, "STS-B", mean=1e5, deviation=123.456)
    model = build_amos(make_task(tmp_path / "STS-B")).eval()
    tokens = torch.tensor([[0, 5, 6, 2]])
    head = model.classification_heads[TEXT_HEAD]
    with torch.no_grad():
        raw = head.output(torch.tanh(head.dense(model.extract_features(tokens)[:, 0])))
        torch.testing.assert_close(model(tokens, classification_head_name=TEXT_HEAD)[0], 1e5 + 123.456 * raw)
    state = {name: value.clone() for name, value in model.half().state_dict().items()}
    change_task(tmp_path, "STS-B", mean=0.0, deviation=2.0)
    other = build_amos(make_task(tmp_path / "STS-B"))
    other.upgrade_state_dict_named(state, "")
    other.load_state_dict(state, strict=True)
    assert other.classification_heads[TEXT_HEAD].scale_bits.view(torch.float64).tolist() == [0, 2]
    without_deviation = torch.tensor([1.0, 0.0], dtype=torch.float64).view(torch.int64)
    for bits in (torch.zeros(3, dtype=torch.int64), torch.zeros(2), without_deviation):
        with pytest.raises(ValueError, match="the scale of a head"):
            scale_of(bits)
    del other.classification_heads[TEXT_HEAD]
    other.register_heads_of(model.state_dict())
    assert other.classification_heads[TEXT_HEAD].scale_bits.view(torch.float64).tolist() == [1e5, 123.456]


def test_nothing_is_computed_at_padding(data, packings):
    task = make_task(data / "CoLA")
    task.load_dataset("valid")
    rows, model = task.datasets["valid"], build_amos(task).eval()
    batch = rows.collater([rows[index] for index in range(len(rows))])
    logits, _ = model(**batch["net_input"], classification_head_name=TEXT_HEAD)
    loaded = SimpleNamespace(model=model, dictionary=task.dictionary)
    sequences = [rows[index]["tokens"] for index in range(len(rows))]
    predicted = predict_logits(loaded, sequences, "cpu", threading.Event())
    assert [len(packing.slots) for packing in packings] == 2 * [sum(rows.sizes)]
    np.testing.assert_allclose(predicted, logits.detach().numpy(), rtol=1e-5, atol=1e-6)  # in another order


def test_what_cannot_be_used_is_refused(data, tmp_path, monkeypatch):
    for directory in (tmp_path / "absent", tmp_path):
        with pytest.raises(UserError, match=r"task\.json is missing"):
            make_task(directory)
    with pytest.raises(UserError, match="--separator-token 5 is not </s>"):
        make_task(data / "RTE", separator_token=5)
    monkeypatch.setattr("fairseq.tasks.FairseqTask.build_model", lambda *_: RobertaModel.__new__(RobertaModel))
    with pytest.raises(UserError, match="has no head for texts"):
        make_task(data / "RTE").build_model(SimpleNamespace(arch="roberta_base"))


def logged_in_batches(kind, logits, target, sizes, training=False, together=False, **record) -> tuple[list, dict]:
    """The losses of batches of these sizes, and what fairseq logs after them; as the trainer does, a value of one element is
    passed as a number. ``together``: as batches of several ranks."""
    criterion = TextClassificationCriterion(SimpleNamespace(record={"kind": kind} | record))
    losses, first, of_a_rank = [], 0, []
    with metrics.aggregate(new_root=True) as aggregated:
        for own, own_target in zip(logits.split(sizes), target.split(sizes), strict=True):
            model = type("Model", (), {"training": training, "__call__": lambda self, own=own, **_: (own, None)})()
            rows = torch.arange(first, first + len(own)).flip(0)
            first += len(own)
            sample = {"net_input": {}, "nsentences": len(own), "ntokens": 9, "id": rows, "num_rows": len(logits)}
            sample["target"] = own_target
            loss, sample_size, log = criterion(model, sample)
            assert sample_size == len(own)
            losses.append(float(loss))
            log = {name: v.item() if torch.is_tensor(v) and v.numel() == 1 else v for name, v in log.items()}
            of_a_rank.append(log)
            if not together:
                criterion.reduce_metrics([log])
        if together:
            assert criterion.logging_outputs_can_be_summed()
            criterion.reduce_metrics(of_a_rank)
    return losses, dict(aggregated.get_smoothed_values())


def test_classes_by_hand():
    """A row whose class the training set lacks (-1) has no loss and is wrong."""
    logits = tensor([[2.0, 0.0, 1.0], [0.0, 3.0, 0.0], [0.0, 0.0, 1.0], [5.0, 0.0, 0.0]])
    losses, values = logged_in_batches("classes", logits, tensor([0, 2, 2, -1]), [3, 1])
    nll = [math.log(sum(map(math.exp, row))) - row[i] for row, i in zip(logits.tolist(), (0, 2, 2), strict=False)]
    assert losses == pytest.approx([sum(nll), 0], rel=1e-6)
    assert values["loss"] == pytest.approx(sum(nll) / 4, abs=1e-4)
    assert values["accuracy"] == 50
    # F1 of class 0: 2/3, of 1: 0 (predicted once), of 2: 2/3, of the unknown class: 0.
    assert values["macro_f1"] == pytest.approx(100 * (2 / 3 + 2 / 3) / 4, abs=1e-3)
    assert values["matthews"] == pytest.approx(100 * matthews_corrcoef([0, 2, 2, -1], [0, 1, 2, 0]), abs=1e-3)
    for together in (False, True):
        sums = logged_in_batches("classes", logits, tensor([0, 2, 2, -1]), [2, 2], together=together)[1]
        assert (sums["accuracy"], sums["matthews"]) == (values["accuracy"], values["matthews"])
    assert "accuracy" not in logged_in_batches("classes", logits, tensor([0, 2, 2, -1]), [4], training=True)[1]


def test_temperature_and_calibration_error():
    """Labels drawn from softmax(logits / 3): the temperature is near 3, no other has a lower loss, and the error falls to what
    chance leaves."""
    generator = np.random.default_rng(0)
    logits = 6 * generator.standard_normal((2000, 4))
    shares = np.exp(logits / 3) / np.exp(logits / 3).sum(1, keepdims=True)
    targets = (generator.random((2000, 1)) > shares.cumsum(1)).sum(1)
    temperature = fit_temperature(logits, targets)
    assert temperature == pytest.approx(3, abs=0.3)  # four deviations, measured over 50 draws

    def loss(divisor):
        return torch.nn.functional.cross_entropy(torch.tensor(logits / divisor), torch.tensor(targets)).item()

    assert loss(temperature) <= min(loss(divisor) for divisor in np.arange(2, 4, 0.01)) + 1e-6
    # One more row, half of it wrong: the probability is 20.5 / 21.
    assert fit_temperature(np.array([[1.0, 0.0]] * 20), np.zeros(20, int)) == pytest.approx(1 / np.log(41), rel=1e-3)
    # In 15 bins of some 133 rows the mean distance of a share is below sqrt(1/4 / 133) = 4.3 %.
    assert calibration_error(logits / temperature, targets) < 4.3 < 10 < calibration_error(logits, targets)
    # Probabilities 0.9, 0.9, 0.6 and right, wrong, right: 2/3 |0.9 - 1/2| + 1/3 |0.6 - 1|.
    by_hand = np.log([[0.9, 0.1], [0.1, 0.9], [0.4, 0.6]])
    assert calibration_error(by_hand, np.array([0, 0, 1])) == pytest.approx(40)


def test_labels_by_hand():
    logits = tensor([[2.0, -1.0], [-3.0, 0.5], [1.0, 1.0]])
    target = tensor([[1.0, 0.0], [0.0, 0.0], [1.0, 0.0]])
    losses, values = logged_in_batches("labels", logits, target.bool(), [2, 1])
    rows = zip(logits.tolist(), target.tolist(), strict=True)
    bce = [[math.log1p(math.exp(-x if y else x)) for x, y in zip(*row, strict=True)] for row in rows]
    assert losses == pytest.approx([sum(map(sum, bce[:2])) / 2, sum(bce[2]) / 2], rel=1e-6)
    assert values["micro_f1"] == pytest.approx(100 * 2 * 2 / (2 * 2 + 2), abs=1e-3)  # two right, two wrong, none missed
    assert values["macro_f1"] == pytest.approx(100 * (1 + 0) / 2, abs=1e-3)
    used = f1_score(target.numpy(), logits.numpy() > 0, average="micro")
    assert values["micro_f1"] == pytest.approx(100 * used, abs=1e-3)


def test_numbers_by_hand():
    logits, target = tensor([[1.0], [5.0], [2.0], [9.0]]), tensor([2.0, 4.0, 1.0, 30.0])
    losses, values = logged_in_batches("number", logits, target, [1, 3], deviation=2.0, mean=3.0)
    assert losses == pytest.approx([1 / 4, (1 + 1 + 441) / 4])
    outputs = logits[:, 0].numpy()
    expected = {"spearman": spearmanr, "pearson": pearsonr}
    for name, measure in expected.items():
        assert values[name] == pytest.approx(100 * measure(outputs, target.numpy())[0], abs=1e-3)
    assert values["mse"] == pytest.approx(float(np.square(outputs - target.numpy()).mean()), rel=1e-4)
