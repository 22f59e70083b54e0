"""ELECTRA models small enough for enumeration, with random values everywhere."""

import torch
from small_models import NUM_WORDS, SETTINGS, small_task

from amos_fairseq.criterions.electra import ElectraCriterion
from amos_fairseq.models.electra import ElectraConfig, ElectraModel

EQUAL_SIZES = {"generator_size": 1.0}
# One of each kind that section 5.3, 5.4.3 or 5.5 of the thesis names; the last word is free.
VARIANTS = {
    "plain": {},
    "none": {"share_weights": "none"},
    "all": {"share_weights": "all", **EQUAL_SIZES},
    "layers": {"generator_layers": 1},
    "unigram": {"generator": "unigram"},
    "uniform": {"generator": "uniform"},
    "temperature": {"generator_temperature": 2.0},
    "disallow": {"disallow_true_token": True},
    "adversarial": {"adversarial": True},
    "frozen": {"frozen_generator": True, "share_weights": "none", **EQUAL_SIZES},
    "replace_mlm": {"main_objective": "replace_mlm"},
    "all_tokens_mlm": {"main_objective": "all_tokens_mlm"},
}


def small_electra(seed: int = 0, num_words: int = NUM_WORDS, **settings) -> ElectraModel:
    """In training mode, no dropout unless asked for; narrow embeddings, so that both networks project them."""
    kept = {name: value for name, value in SETTINGS.items() if name not in ("generator_depths", "max_update")}
    torch.manual_seed(seed)
    cfg = ElectraConfig(**(kept | {"embedding_dim": 8, "generator_size": 0.5} | settings))
    model = ElectraModel.build_model(cfg, small_task(num_words))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return model.train()


def small_electra_criterion(discriminator_loss_weight: float = 50.0, **settings) -> ElectraCriterion:
    return ElectraCriterion(small_task(), discriminator_loss_weight, **settings)
