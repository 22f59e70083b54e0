"""A choice from a flag is a string, one from YAML is fairseq's StrEnum: both build the same model and compute the same."""

import pytest
import torch
from omegaconf import OmegaConf
from small_models import AMOS_SETTINGS, small_batch, small_task

from amos_fairseq.models.amos import AmosConfig, AmosModel
from amos_fairseq.models.electra import ElectraConfig, ElectraModel
from amos_fairseq.models.electric import ElectricConfig, ElectricModel
from amos_fairseq.models.teams import TeamsConfig, TeamsModel

EQUAL = {"generator_size": 1.0}
VARIANTS = [
    (AmosModel, AmosConfig, {"mixture": "uniform", "relative_position_scheme": "amos"}),
    (AmosModel, AmosConfig, {"kernels": "reference", "pooler_activation_fn": "gelu"}),
    (ElectraModel, ElectraConfig, {"generator": "unigram", "main_objective": "all_tokens_mlm"}),
    (ElectraModel, ElectraConfig, {"share_weights": "none", "main_objective": "replace_mlm", **EQUAL}),
    (ElectraModel, ElectraConfig, {"share_weights": "all", **EQUAL}),
    (ElectricModel, ElectricConfig, {"electric_variant": "electra_tt", "generator_loss_tokens": "all", **EQUAL}),
    (ElectricModel, ElectricConfig, {"electric_variant": "two_tower", "generator_loss_tokens": "all", **EQUAL}),
    (TeamsModel, TeamsConfig, {"share_layers": "all", "task_heads": "ffn", "negative_sampling": "hardest"}),
    (TeamsModel, TeamsConfig, {"share_layers": "none", "task_heads": "extra_layer", "representation": "rtd"}),
]


@pytest.mark.parametrize(("model_class", "config_class", "choices"), VARIANTS, ids=lambda value: str(value))
def test_choices_from_flags_and_from_yaml_are_the_same(model_class, config_class, choices) -> None:
    known = config_class.__dataclass_fields__
    settings = {name: value for name, value in AMOS_SETTINGS.items() if name in known} | choices
    settings |= {"mask_prob": 0.25} if "mask_prob" in known else {}
    from_flags = config_class(**settings)
    from_yaml = OmegaConf.merge(OmegaConf.structured(config_class), settings)
    for name in choices:
        if not isinstance(choices[name], float):
            assert (type(getattr(from_flags, name)), type(getattr(from_yaml, name)).__name__) == (str, "Choices")
    results = []
    for cfg in (from_flags, from_yaml):
        torch.manual_seed(0)
        model = model_class.build_model(cfg, small_task())
        torch.manual_seed(1)
        results.append((str(model), model.depth_names, model(**small_batch()["net_input"])))
    assert results[0][:2] == results[1][:2]
    torch.testing.assert_close(results[0][2], results[1][2], rtol=0, atol=0)
