"""Settings that exclude one another or have no meaning, of every objective: refused in one line that names the flag."""

import pytest
from small_models import DEBERTA, EQUAL_SIZES, MODERN, ONLY_MWS, model_and_criterion

from amos_fairseq.errors import UserError

FROZEN = {"generator_checkpoint": "mlm"}
NO_DETECTION = {"main_objective": "replace_mlm"}
REFUSED = {
    "mlm": [
        ({"encoder_attention_heads": 3}, "multiple of the number of attention heads 3"),
        ({"encoder_layers": 0}, "--encoder-layers 0 must be above 0"),
        ({"dropout": 1.5}, "--dropout 1.5 must be 0 or more and below 1"),
        ({"freeze_encoder": True}, "--freeze-encoder True is a setting of fine-tuning"),
        ({"local_attention": 8}, "--encoder bert has no local_attention"),
        (MODERN | {"relative_position_scheme": "t5"}, "has rotary positions"),
        (MODERN | {"token_types": 2}, "has no token types"),
        (MODERN | {"local_attention": 5}, "an even --local-attention"),
        (MODERN | {"embedding_dim": 8}, "leave --embedding-dim out"),
        (MODERN | {"encoder_embed_dim": 18, "encoder_attention_heads": 6}, "heads of the odd width 3"),
        (DEBERTA | {"relative_position_scheme": "t5"}, "has positions of its own"),
        (DEBERTA | {"local_attention": 8}, "--encoder deberta has no local_attention"),
        (DEBERTA | {"relative_position_buckets": 6}, "--relative-position-buckets 6 must be a multiple of 4"),
        (DEBERTA | {"relative_position_max_distance": 3}, "max-distance 3 is too small for 8 rows"),
    ],
    "amos": [
        ({"generator_depths": ""}, "--generator-depths needs ascending layer numbers .* got ''"),
        ({"generator_depths": "4,x"}, "--generator-depths"),
        ({"generator_depths": "2,2"}, "ascending"),
        ({"generator_depths": "0,2"}, "from 1 on"),
        ({"generator_depths": "4,2", "separate_generators": True}, "ascending"),
        ({"mixture": "fixed", "fixed_mixture_weights": "0.5,0.5"}, "--fixed-mixture-weights needs 3 numbers"),
        ({"mixture": "fixed", "fixed_mixture_weights": "0.5;0.2;0.3"}, "--fixed-mixture-weights needs numbers such as"),
        ({"mixture": "fixed", "fixed_mixture_weights": "0.5,nan,0.5"}, "3 numbers of sum 1"),
        ({"mixture": "fixed", "fixed_mixture_weights": "-0.5,1,0.5"}, "3 numbers of sum 1"),
        ({"fixed_mixture_weights": "0,0,0"}, "needs --mixture fixed, not learned"),
        ({"mixture": "layer_switch", "max_update": 0}, "needs --max-update"),
        (
            {"relative_position_scheme": "t5", "relative_position_buckets": 2},
            "--relative-position-buckets 2 is too few",
        ),
        ({"relative_position_scheme": "amos", "relative_position_buckets": 7}, "--relative-position-buckets 7 is odd"),
        ({"relative_position_scheme": "t5", "relative_position_max_distance": 2}, "max-distance 2 is too small"),
        (FROZEN | {"separate_generators": True}, "--separate-generators has no meaning with --generator-checkpoint"),
        (FROZEN | {"no_stop_gradient": True}, "--no-stop-gradient has no meaning with --generator-checkpoint"),
        (FROZEN | {"adversarial_mlm_multiplier": 0.5}, "--adversarial-mlm-multiplier has no meaning with"),
        (FROZEN | {"disentangled_embeddings": True}, "--disentangled-embeddings has no meaning with"),
        (FROZEN | {"mixture": "fixed", "fixed_mixture_weights": "0.5,0.5"}, "--fixed-mixture-weights needs 1 numbers"),
        ({"encoder_mlm_weight": -1.0}, "--encoder-mlm-weight -1.0 must be 0 or more"),
    ],
    "electra": [
        (DEBERTA | {"generator_layers": 1}, "--generator-layers 2 or more"),
        ({"generator_size": 0.3}, "--generator-size 0.3 leaves no whole width"),
        ({"share_weights": "all"}, "needs equal networks"),
        ({"share_weights": "all", "generator_layers": 1, **EQUAL_SIZES}, "needs equal networks"),
        ({"share_weights": "all", "adversarial": True, **EQUAL_SIZES}, "trains the discriminator to fail"),
        (
            {"share_weights": "all", "discriminator_lr_scale": 0.2, **EQUAL_SIZES},
            "--discriminator-lr-scale has no meaning",
        ),
        (FROZEN | {"share_weights": "none"}, "--share-weights has no meaning with --generator-checkpoint"),
        (FROZEN | {"adversarial": True}, "--adversarial has no meaning with --generator-checkpoint"),
        (FROZEN | {"generator_layers": 1}, "--generator-layers has no meaning with --generator-checkpoint"),
        (FROZEN | {"disentangled_embeddings": True}, "--disentangled-embeddings has no meaning"),
        (FROZEN | {"generator": "unigram"}, "--generator-checkpoint has no meaning with --generator unigram"),
        ({"generator_checkpoint": "mlm:narrow"}, "electra has one generator"),
        ({"generator_temperature_start": 2.0, "max_update": 0}, "needs --max-update"),
        (NO_DETECTION | {"adversarial": True}, "--adversarial has no meaning with --main-objective replace_mlm"),
        (NO_DETECTION | {"encoder_mlm_weight": 1.0}, "--encoder-mlm-weight has no meaning"),
        ({"generator": "unigram", "adversarial": True}, "--adversarial has no meaning"),
        ({"generator": "uniform", "share_weights": "none"}, "--share-weights has no meaning"),
        ({"generator": "uniform", "generator_layers": 1}, "--generator-layers has no meaning"),
        ({"disentangled_embeddings": True, "share_weights": "none"}, "--disentangled-embeddings needs a generator"),
        ({"disentangled_embeddings": True, "generator": "unigram"}, "--disentangled-embeddings needs a generator"),
    ],
    "two_tower": [
        ({"generator_size": 0.5}, "--generator-size 1 --generator-loss-tokens all"),
        ({"generator_loss_tokens": "sampled"}, "--generator-size 1 --generator-loss-tokens all"),
    ],
    "teams": [
        ({"mws_loss_weight": 0.0, "rtd_loss_weight": 0.0}, "leaves no task: give a weight, .*--arch mlm_base"),
        ({"mws_loss_weight": 0.0}, "mws is a branch of weight 0: give rtd"),
        ({"rtd_loss_weight": 0.0, "representation": "rtd"}, "rtd is a branch of weight 0: give mws"),
        ({"mws_loss_weight": float("nan")}, "--mws-loss-weight nan"),
        (ONLY_MWS | {"task_heads": "ffn"}, "--task-heads ffn has no meaning with a single task"),
        ({"task_heads": "ffn", "representation": "rtd"}, "--representation rtd has no meaning"),
        (MODERN | {"task_heads": "ffn"}, "--task-heads ffn is BERT's"),
        ({"negative_samples": 40}, "must be from 1 to 39"),
        ({"encoder_layers": 2}, "give --generator-layers 2"),
        ({"encoder_layers": 1, "generator_layers": 2}, "--encoder-layers 2 or more"),
        ({"generator_layers": 6, "share_layers": "all"}, "--generator-layers 6 shares 6 layers"),
    ],
}


@pytest.mark.parametrize("objective", REFUSED)
def test_settings_without_a_meaning_are_refused(objective: str) -> None:
    for settings, named in REFUSED[objective]:
        with pytest.raises(UserError, match=named) as refused:
            model_and_criterion(objective, **settings)
        assert "\n" not in str(refused.value), settings
