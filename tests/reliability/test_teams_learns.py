"""TEAMS's two tasks are learned, on a text in which each word follows from the one before it."""

import torch
from small_models import BLOCK_LENGTH, small_dictionary, small_teams, teams_criterion

UPDATES, BLOCKS, SLOTS = 500, 48, 2
WIDER = {"encoder_embed_dim": 32, "encoder_ffn_embed_dim": 64, "init_std": 0.1, "linear_init_std": 0.1}
WIDER |= {"relative_position_scheme": "t5"}  # without it the neighbours are found much later


def block_batch(successor: torch.Tensor, draw: torch.Generator) -> dict:
    """Blocks that start anywhere in the cycle of words, two positions masked."""
    mask = small_dictionary().index("<mask>")
    tokens = torch.zeros(BLOCKS, BLOCK_LENGTH, dtype=torch.int64)
    tokens[:, 1] = torch.randint(4, 44, (BLOCKS,), generator=draw)
    for place in range(2, BLOCK_LENGTH):
        tokens[:, place] = successor[tokens[:, place - 1] - 4]
    positions = 1 + torch.rand(BLOCKS, BLOCK_LENGTH - 1, generator=draw).argsort(-1)[:, :SLOTS].sort(-1).values
    net_input = {
        "tokens": tokens,
        "masked_tokens": tokens.scatter(1, positions, mask),
        "masked_positions": positions,
        "masked_weights": torch.ones(BLOCKS, SLOTS),
    }
    counts = {"nsentences": BLOCKS, "ntokens": tokens.numel(), "num_masked": BLOCKS * SLOTS}
    return {"net_input": net_input, **counts}


def test_words_are_selected_and_replacements_found() -> None:
    draw = torch.Generator().manual_seed(0)
    successor = 4 + torch.randperm(40, generator=draw)
    model = small_teams(seed=1, **WIDER)
    criterion = teams_criterion(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    history = []
    for _ in range(UPDATES):
        loss, sample_size, log = criterion(model, block_batch(successor, draw))
        optimizer.zero_grad()
        (loss / sample_size).backward()
        optimizer.step()
        history.append(log)

    def share(key: str, whole: str, updates: slice) -> float:
        return sum(float(log[key]) for log in history[updates]) / sum(float(log[whole]) for log in history[updates])

    start, end = slice(0, 10), slice(-20, None)
    assert share("mws_acc", "sample_size", start) < 0.5  # one of four candidates; chance is 1/4
    assert share("mws_acc", "sample_size", end) > 0.8
    assert share("rtd_loss", "ntokens", end) < 0.6 * share("rtd_loss", "ntokens", start)
    assert share("_true_positives", "_replaced", end) > 0.5
