"""TEAMS in fairseq's own trainer, and the branch that a task gets from its checkpoint."""

import argparse
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fairseq import checkpoint_utils
from fairseq.data import Dictionary
from fairseq.models import ARCH_CONFIG_REGISTRY
from tiny_runs import SIXTY_UPDATES

from amos_fairseq.models.teams import TeamsConfig, TeamsModel
from amos_fairseq.run.metrics_file import read_records

SMALLER = {"encoder_embed_dim": 32, "encoder_ffn_embed_dim": 64, "max_positions": 32}  # tiny_runs.TINY_RUN


@pytest.mark.slow
def test_teams_trains_and_leaves_both_branches(run_training, binarized_corpus: Path, tmp_path: Path) -> None:
    run_training(tmp_path, "--arch", "teams_tiny", "--criterion", "teams", *SIXTY_UPDATES)
    records = read_records(tmp_path)
    train = [record for record in records if record["split"] == "train"]
    first, last = train[0], train[-1]
    # 200 words: a prediction by chance costs log 200 nats, among six candidates log 6; each word has four frequent successors.
    # The candidates grow harder as the generator learns: test_teams_learns.py sees the selection learn.
    assert first["mlm_loss_2"] > 0.95 * math.log(200)
    assert last["mlm_loss_2"] < first["mlm_loss_2"] - 0.1
    assert first["mws_loss"] > 0.95 * math.log(6)
    assert last["loss"] < first["loss"] - 0.5
    valid = [record for record in records if record["split"] == "valid"][-1]
    assert {"mws_loss", "mws_acc", "mlm_acc_2", "rtd_loss", "rtd_acc", "rtd_auc", "replaced"} <= valid.keys()
    # Eq. 9; blocks that are not full weigh the detection loss by their own tokens.
    weighted = valid["mlm_loss_2"] + 5 * valid["rtd_loss"] + 2 * valid["mws_loss"]
    assert math.isclose(valid["loss"], weighted, rel_tol=0.02)

    state = checkpoint_utils.load_checkpoint_to_cpu(str(tmp_path / "checkpoint_last.pt"))["model"]
    dictionary = Dictionary.load(str(binarized_corpus / "dict.txt"))
    dictionary.add_symbol("<mask>")
    tokens = torch.randint(4, 150, (3, 20), generator=torch.Generator().manual_seed(0))
    states = {}
    for representation in ("mws", "rtd"):
        args = argparse.Namespace(**SMALLER, representation=representation)
        ARCH_CONFIG_REGISTRY["teams_tiny"](args)
        model = TeamsModel.build_model(TeamsConfig(**vars(args)), SimpleNamespace(source_dictionary=dictionary)).eval()
        model.load_state_dict(dict(state), strict=True)
        states[representation] = model.extract_features(tokens)
    assert torch.equal(model.encoder.layers[1].ffn_out.weight, state["rtd_layer.ffn_out.weight"])
    assert not torch.equal(state["discriminator.layers.1.ffn_out.weight"], state["rtd_layer.ffn_out.weight"])
    assert not torch.allclose(states["mws"], states["rtd"])
