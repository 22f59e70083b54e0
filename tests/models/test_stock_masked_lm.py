"""An ``mlm_*`` architecture under fairseq's own task and criterion ``masked_lm``."""

import pytest
import torch
from fairseq.criterions.masked_lm import MaskedLmLoss
from fairseq.dataclass.configs import FairseqConfig
from fairseq.tasks.masked_lm import MaskedLMConfig, MaskedLMTask
from omegaconf import OmegaConf
from small_models import ENCODER_SETTINGS, small_batch, small_dictionary, small_mlm

from amos_fairseq.errors import UserError
from amos_fairseq.models.configuration import EncoderConfig
from amos_fairseq.models.electra import ElectraConfig, ElectraModel
from amos_fairseq.models.mlm import MlmModel
from amos_fairseq.models.pretraining import PretrainingBatch


def stock_task() -> MaskedLMTask:
    dictionary = small_dictionary()
    return MaskedLMTask(OmegaConf.merge(OmegaConf.structured(MaskedLMConfig), {"data": "DATA"}), dictionary)


def test_the_loss_of_fairseq_is_that_of_the_objective() -> None:
    ours = small_mlm().double().eval()
    stock = MlmModel.build_model(EncoderConfig(**ENCODER_SETTINGS), stock_task()).double().eval()
    stock.load_state_dict(ours.state_dict())
    batch = PretrainingBatch.of(small_batch())
    is_masked = torch.zeros_like(batch.tokens, dtype=torch.bool)
    is_masked[torch.arange(len(batch.tokens))[:, None], batch.masked_positions] = batch.masked_weights.bool()
    # A padded slot points at position 0, which is never masked.
    is_masked[:, 0] = False
    target = batch.tokens.where(is_masked, stock_task().source_dictionary.pad())
    sample = {
        "net_input": {"src_tokens": batch.masked_tokens, "src_lengths": None},
        "target": target,
        "ntokens": 0,
        "nsentences": len(target),
    }
    config = OmegaConf.structured(FairseqConfig)
    loss, sample_size, _ = MaskedLmLoss(OmegaConf.create({"tpu": config.common.tpu}), stock_task())(stock, sample)
    expected = (ours(batch).mlm_nll.double() * batch.masked_weights).sum()
    assert sample_size == batch.masked_weights.sum()
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=0)  # both losses are computed in float32
    everywhere, _ = stock(batch.tokens)
    assert everywhere.shape == (batch.tokens.numel(), ours.vocabulary.padded_size)


def test_other_objectives_are_refused() -> None:
    with pytest.raises(UserError, match="--task masked_lm trains --arch mlm_"):
        ElectraModel.build_model(ElectraConfig(), stock_task())
