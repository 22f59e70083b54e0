"""metrics.jsonl and TensorBoard of a real fairseq-train run: the contract's keys."""

import math
from collections import Counter

import pytest
from interrupted_run import records
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

CONTRACT = {"loss", "mlm_loss_1", "mlm_loss_2", "mlm_acc_1", "mlm_acc_2", "mixture_1", "mixture_2", "mixture_entropy"}
CONTRACT |= {"replaced", "rtd_loss", "rtd_acc", "rtd_auc", "rtd_recall", "rtd_precision"}


@pytest.mark.slow
def test_metrics_of_a_run(run_training, corpus_text, tmp_path):
    boards = tmp_path / "tensorboard"
    flags = ["--save-interval-updates", "3", "--max-update", "6"]
    run_training(tmp_path, *flags, "--tensorboard-logdir", str(boards))
    logged = records(tmp_path)

    assert [record["update"] for record in logged if record["split"] == "train"] == [1, 2, 3, 4, 5, 6]
    validations = [record["update"] for record in logged if record["split"] == "valid"]
    assert (validations[0], validations[-1]) == (3, 6)
    for record in logged:
        assert record.keys() >= CONTRACT | {"split", "update", "epoch"}
        assert all(value is None or math.isfinite(value) for key, value in record.items() if key != "split")
    # The entropy of the words of the validation split, the last tenth of the text.
    text = corpus_text.read_text(encoding="utf-8").splitlines()
    words = " ".join(text[len(text) * 9 // 10 :]).split()
    entropy = -sum(count / len(words) * math.log(count / len(words)) for count in Counter(words).values())
    for record in logged:
        expected = pytest.approx(entropy, abs=5e-4) if record["split"] == "valid" else None
        assert record.get("unigram_entropy") == expected
    for tag in ("train_inner", "valid"):
        board = EventAccumulator(str(boards / tag)).Reload()
        assert set(board.Tags()["scalars"]) >= CONTRACT
    last_loss = board.Scalars("loss")[-1]
    assert (last_loss.step, round(last_loss.value, 3)) == (6, round(logged[-1]["loss"], 3))
