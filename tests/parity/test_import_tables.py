"""The encoder and the tables of weight names against Hugging Face's own classes, in both directions and every family."""

import pytest
import torch
import transformers
from hugging_face_folders import TOLERANCE
from small_models import deberta_config, encoder_config, modern_config
from torch import nn

from amos_fairseq.hugging_face.config import hugging_face_config
from amos_fairseq.hugging_face.weights import (
    CUSTOM,
    DEBERTA_V2,
    FAMILIES,
    Head,
    class_name,
    from_hugging_face,
    to_hugging_face,
)
from amos_fairseq.modules.encoder import TransformerConfig

ROWS = 30
LONGEST = 150  # past MPNet's maximum distance of 128
PARTS = [
    (family, part)
    for family, table in FAMILIES.items()
    if family not in (CUSTOM, "distilbert")  # the latter is never exported
    for part in (Head.NONE, *table.heads)
    # The heads that only DeBERTa's authors write.
    if not (family == DEBERTA_V2 and part in (Head.MASKED_LM, Head.PRETRAINING))
]


def config_of(family: str = "bert", **changes) -> TransformerConfig:
    if family == "modernbert":
        return modern_config(**{"width": 12, "ffn_width": 20, "num_heads": 3, "max_positions": LONGEST} | changes)
    if family == DEBERTA_V2:  # beyond the maximum distance transformers has another bucket
        sizes = {"max_positions": LONGEST, "position_buckets": 32, "position_max_distance": LONGEST, "num_layers": 2}
        return deberta_config(**{"width": 12, "ffn_width": 20, "num_heads": 3} | sizes | changes)
    sizes = {"num_layers": 2, "width": 12, "ffn_width": 20, "num_heads": 3, "max_positions": LONGEST}
    positions = {"position_scheme": "none", "position_buckets": 32, "position_max_distance": 128}
    return encoder_config(**(sizes | positions | changes))


def hugging_face_model(family: str, part: str, seed: int = 0, **changes) -> nn.Module:
    """One of their classes with random values everywhere, except in rows of positions that they never use."""
    pad = 0 if family in ("bert", "electra", "modernbert", DEBERTA_V2) else 1
    config = hugging_face_config(family, config_of(family, **changes), ROWS, pad_token_id=pad)
    is_pooled = part == Head.NONE and family not in ("electra", "modernbert", DEBERTA_V2)
    bare = {"add_pooling_layer": False} if is_pooled else {}
    torch.manual_seed(seed)
    model = getattr(transformers, class_name(family, part))(config, **bare).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # No LayerNorm is between ModernBERT's layers: with larger weights its sums, and their roundings, grow fast.
            parameter.copy_(torch.randn_like(parameter) * (0.3 if family == "modernbert" else 1))
            if "position_embeddings" in name and family in ("mpnet", "roberta"):
                parameter[:2] = 0
            if part == Head.DETECTION and name.startswith("classifier"):
                parameter[0] = 0
    return model


@pytest.mark.parametrize(("family", "part"), PARTS)
def test_round_trip_is_the_identity(family, part):
    projected = {"embedding_width": 8} if family == "electra" else {}
    theirs = hugging_face_model(family, part, **projected).state_dict()
    weights, unexpected_keys = from_hugging_face(family, theirs, () if part == Head.NONE else (part,))
    assert unexpected_keys == []
    back = to_hugging_face(family, part, weights)
    assert back.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(back[name], tensor), name
    # A second instance accepts them by name.
    hugging_face_model(family, part, seed=1, **projected).load_state_dict(back, strict=True)


@torch.no_grad()
@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("mpnet", {"position_scheme": "t5"}),
        ("electra", {"embedding_width": 8, "num_token_types": 2}),
        ("bert", {"num_token_types": 2, "layer_norm_eps": 1e-12}),
        ("roberta", {"num_token_types": 1}),
        (DEBERTA_V2, {"layer_norm_eps": 1e-7}),
        ("modernbert", {}),
        ("modernbert", {"global_every": 2, "local_attention": 6, "global_theta": 1000.0, "local_theta": 50.0}),
    ],
)
def test_hidden_states_agree(family, changes):
    """Every layer's states, lengths from 1 to the maximum, right padding, both token types."""
    theirs = hugging_face_model(family, Head.NONE, **changes)
    pad = theirs.config.pad_token_id
    weights = from_hugging_face(family, theirs.state_dict())[0]
    encoder = config_of(family, **changes).build().eval()
    encoder.load_state_dict({n.removeprefix("encoder."): t for n, t in weights.items() if n.startswith("encoder.")})
    lengths = (1, 2, 3, 7, 40, 127, 128, 129, LONGEST - 1, LONGEST)
    tokens = torch.randint(2, ROWS, (len(lengths), LONGEST))
    for row, length in enumerate(lengths):
        tokens[row, length:] = pad
    types = (
        None
        if family in ("mpnet", "modernbert", DEBERTA_V2)
        else torch.randint(0, changes["num_token_types"], tokens.shape)
    )
    given = {} if types is None else {"token_type_ids": types}
    expected = theirs(tokens, attention_mask=tokens.ne(pad).long(), output_hidden_states=True, **given).hidden_states
    outputs = encoder(weights["embed_tokens.weight"][tokens], tokens.eq(pad), token_types=types)
    real = tokens.ne(pad)
    ours = [*outputs.sums[:-1], outputs[-1]]  # Hugging Face normalizes the last layer of ModernBERT alone
    for depth, (a, b) in enumerate(zip(ours, expected[1:], strict=True), start=1):
        assert (a[real] - b[real]).abs().max() < TOLERANCE * b[real].abs().max(), f"layer {depth}"
