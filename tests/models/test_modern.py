"""Every objective on ModernBERT's encoder: what is shared, depths, heads, fine-tuning."""

import torch
from small_models import (
    ENCODER_SETTINGS,
    MODERN,
    fine_tuning_task,
    model_and_criterion,
    small_amos,
    small_batch,
    small_electra,
    small_electric,
    small_teams,
)
from torch import nn

from amos_fairseq.models.amos import AmosConfig, AmosModel
from amos_fairseq.models.pretraining import PretrainingBatch
from amos_fairseq.modules.encoder import parameter_group
from amos_fairseq.modules.heads import NormedDetectionHead
from amos_fairseq.modules.modern_encoder import ModernBertEncoder, ModernBertLayer


def test_all_networks_are_of_the_family_and_only_the_output_layers_have_biases() -> None:
    for objective in ("mlm", "electra", "amos", "teams", "electric"):
        model, _ = model_and_criterion(objective, **MODERN)
        layers = [module for module in model.modules() if type(module).__name__.endswith("Layer")]
        assert layers
        assert all(isinstance(layer, ModernBertLayer) for layer in layers)
        biases = {name for name, _ in model.named_parameters() if name.endswith("bias")}
        heads = ("mlm_head.bias", "mlm_heads.0.bias", "detection_head.output.bias")
        assert biases <= set(heads), biases - set(heads)


def test_networks_share_what_the_objective_says() -> None:
    electra = small_electra(**MODERN)
    assert electra.generator.embedding_norm is electra.discriminator.embedding_norm
    assert electra.generator.embedding_projection is not electra.discriminator.embedding_projection
    assert electra.generator.final_norm is not electra.discriminator.final_norm
    teams = small_teams(**MODERN)
    assert teams.generator.layers[0] is teams.discriminator.layers[0]
    assert teams.generator.layers[1] is not teams.discriminator.layers[1]
    amos = small_amos(**MODERN)
    own = {id(parameter) for parameter in amos.generators.parameters()}
    assert not own & {id(parameter) for parameter in amos.discriminator.parameters()}


def test_both_branches_of_teams_end_with_the_same_kind_of_layer() -> None:
    """Of four layers the last is global, as the first."""
    teams = small_teams(**MODERN)
    assert [layer.attention.is_global for layer in teams.discriminator.layers] == [True, False, False, True]
    assert teams.rtd_layer.attention.is_global
    tokens = small_batch()["net_input"]["tokens"]
    _, of_rtd = teams.discriminate(tokens, tokens.eq(1))
    teams.cfg.representation = "rtd"
    torch.testing.assert_close(teams.extract_features(tokens), of_rtd)


def test_depths_are_read_through_the_last_layer_norm_and_do_not_train_the_blocks_below() -> None:
    amos = small_amos(**MODERN)
    batch = small_batch()["net_input"]
    features, _ = amos.generate(PretrainingBatch(**batch))
    outputs = amos.generators[0](amos.embed_tokens(batch["masked_tokens"]), batch["tokens"].eq(1))
    norm = amos.generators[0].final_norm
    for feature, depth in zip(features, amos.depths, strict=True):
        everywhere = nn.functional.layer_norm(outputs.sums[depth - 1], (16,), norm.weight, None, 1e-5)
        positions = batch["masked_positions"].unsqueeze(-1).expand(-1, -1, 16)
        torch.testing.assert_close(feature, everywhere.gather(1, positions))
    features[1].pow(3).sum().backward()
    layers = amos.generators[0].layers
    assert layers[0].ffn_in.weight.grad is None
    assert layers[1].ffn_in.weight.grad.abs().max() > 0
    assert norm.weight.grad.abs().max() > 0


def test_detection_heads_have_the_form_of_the_family() -> None:
    for model in (small_electra(**MODERN), small_amos(**MODERN), small_teams(**MODERN), small_electric(**MODERN)):
        head = model.detection_head
        assert isinstance(head, NormedDetectionHead)
        states = torch.randn(2, 3, 16)
        hidden = nn.functional.gelu(states @ head.transform.dense.weight.T)
        normed = nn.functional.layer_norm(hidden, (16,), head.transform.norm.weight, None, 1e-5)
        torch.testing.assert_close(head(states), normed @ head.output.weight[0] + head.output.bias)


def test_the_last_layer_norm_belongs_to_the_heads_and_to_the_discriminator() -> None:
    model = small_amos(**MODERN, discriminator_lr_scale=0.5)
    scales = {name: parameter_group(parameter).lr_scale for name, parameter in model.named_parameters()}
    assert scales["discriminator.final_norm.weight"] == scales["detection_head.transform.norm.weight"] == 0.5
    assert scales["generators.0.final_norm.weight"] == scales["discriminator.embedding_norm.weight"] == 1.0
    tuned = AmosModel.build_model(AmosConfig(**(ENCODER_SETTINGS | MODERN)), fine_tuning_task())
    tuned.register_classification_head("task", 2)
    depths = {name: parameter_group(parameter).depth for name, parameter in tuned.named_parameters()}
    assert depths["encoder.final_norm.weight"] == depths["classification_heads.task.transform.norm.weight"] == 0
    assert (depths["encoder.layers.1.ffn_in.weight"], depths["encoder.embedding_norm.weight"]) == (1, 3)


def test_fine_tuning_starts_from_the_pretrained_encoder() -> None:
    pretrained = small_amos(**MODERN)
    state = pretrained.state_dict()
    tuned = AmosModel.build_model(AmosConfig(**(ENCODER_SETTINGS | MODERN)), fine_tuning_task()).eval()
    assert isinstance(tuned.encoder, ModernBertEncoder)
    tuned.upgrade_state_dict_named(state, "")
    tuned.load_state_dict(state)
    tokens = small_batch()["net_input"]["tokens"]
    real = tokens.ne(1)
    torch.testing.assert_close(tuned.extract_features(tokens)[real], pretrained.eval().extract_features(tokens)[real])
