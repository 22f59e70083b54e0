"""The token embedding is one tensor in generator, output layer and discriminator, also after conversion and loading."""

import copy
from pathlib import Path

import pytest
import torch
from fairseq.dataclass.configs import FairseqConfig
from fairseq.trainer import Trainer
from omegaconf import OmegaConf
from small_models import NUM_TOKENS, amos_criterion, small_amos, small_batch, small_task

from amos_fairseq.models.amos import AmosModel
from amos_fairseq.models.pretraining import PretrainingBatch
from amos_fairseq.run import precision

MASK = 4 + NUM_TOKENS


def saved_state(model: AmosModel, path: Path) -> dict[str, torch.Tensor]:
    """The model's state after saving and loading; the embedding is in it once."""
    state = model.state_dict()
    rows = [name for name, value in state.items() if value.shape == model.embed_tokens.weight.shape]
    assert rows == ["embed_tokens.weight"]
    assert len(state) == len(list(model.parameters()))
    torch.save(state, path)
    return torch.load(path, weights_only=True)


def assert_one_embedding(model: AmosModel) -> None:
    """In place changes of ``embed_tokens.weight`` are seen by the generator's input, output layer and discriminator."""
    matrices = [p for p in model.parameters() if p.shape == model.embed_tokens.weight.shape]
    assert len(matrices) == 1
    assert matrices[0] is model.embed_tokens.weight
    batch = small_batch()["net_input"]
    before, features = model.predict_logits(PretrainingBatch(**batch))[0], model.extract_features(batch["tokens"])
    token = int(batch["tokens"][0, 1])
    absent = next(w for w in range(4, MASK) if not batch["masked_tokens"].eq(w).any() and w != token)
    unread = next(w for w in range(4, MASK) if not batch["tokens"].eq(w).any())
    with torch.no_grad():
        model.embed_tokens.weight[absent] *= -1
    after = model.predict_logits(PretrainingBatch(**batch))[0]
    changed = (after - before).abs().amax((0, 1, 2)).nonzero().flatten().tolist()
    assert changed == [absent]  # only the output layer uses that token
    with torch.no_grad():
        model.embed_tokens.weight[token] *= -1
    assert not torch.allclose(
        model.predict_logits(PretrainingBatch(**batch))[0][:, 0, :, unread], after[:, 0, :, unread]
    )
    assert not torch.allclose(model.extract_features(batch["tokens"])[0], features[0])


@pytest.mark.parametrize("convert", [lambda m: m, lambda m: m.half(), lambda m: m.bfloat16(), copy.deepcopy])
@pytest.mark.parametrize("settings", [{}, {"separate_generators": True}], ids=str)
def test_after_conversion_and_loading(settings, convert, tmp_path):
    state = saved_state(convert(small_amos(**settings)), tmp_path / "state.pt")
    model = convert(small_amos(seed=1, **settings))
    model.load_state_dict(state)
    assert torch.equal(model.embed_tokens.weight, state["embed_tokens.weight"])
    assert_one_embedding(model.float())


DTYPES = {"cpu": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@pytest.mark.parametrize(("flag", "dtype"), DTYPES.items())
def test_in_the_trainer_of_fairseq(flag, dtype, tmp_path, monkeypatch):
    """fairseq's trainer converts the model and puts shared parameters back in its own way; then a checkpoint is loaded."""
    # The trainer of a CPU refuses fp16, but it converts a model as that of a GPU does.
    monkeypatch.setattr(precision, "visible_gpus", lambda cfg: int(flag == "fp16"))
    config = OmegaConf.structured(FairseqConfig)
    config.common.update({"cpu": True, flag: True})
    model = small_amos(seed=1)
    trainer = Trainer(config, small_task(), model, amos_criterion())
    assert trainer.model is model
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    trainer.model.load_state_dict(saved_state(small_amos(), tmp_path / "state.pt"))
    assert torch.equal(model.embed_tokens.weight, small_amos().embed_tokens.weight.to(dtype))
    assert_one_embedding(model.float())
