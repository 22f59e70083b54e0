"""ELECTRA in fairseq's own trainer."""

import math
from pathlib import Path

import pytest
from tiny_runs import SIXTY_UPDATES

from amos_fairseq.run.metrics_file import read_records


@pytest.mark.slow
def test_electra_trains_and_its_losses_fall(run_training, tmp_path: Path) -> None:
    run_training(tmp_path, "--arch", "electra_tiny", "--criterion", "electra", *SIXTY_UPDATES)
    records = read_records(tmp_path)
    train = [record for record in records if record["split"] == "train"]
    first, last = ([record[key] for key in ("mlm_loss_2", "loss")] for record in (train[0], train[-1]))
    # 200 words: a prediction by chance costs log 200 nats; each word has four frequent successors.
    assert first[0] > 0.95 * math.log(200)
    assert last[0] < first[0] - 0.1
    assert last[1] < first[1]
    valid = [record for record in records if record["split"] == "valid"][-1]
    assert {"rtd_loss", "rtd_acc", "rtd_auc", "rtd_recall", "rtd_precision", "replaced", "mlm_acc_2"} <= valid.keys()
    assert not any(key.startswith("mixture") for key in valid)
