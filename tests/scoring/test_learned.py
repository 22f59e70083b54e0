"""After training on a small known distribution, pseudo-log-likelihoods equal those by enumeration."""

import itertools

import pytest
import torch
from saved_models import SCORED_SIZES, pretrained

from amos_fairseq.models.configuration import EncoderConfig
from amos_fairseq.models.mlm import MlmModel
from amos_fairseq.models.pretraining import PretrainingBatch
from amos_fairseq.scoring.token_scorers import build_token_scorer

NUM_WORDS = 4
SENTENCES = list(itertools.product(range(NUM_WORDS), repeat=3))
STEPS = 300


def joint() -> torch.Tensor:
    """P of every sentence of three words: [4,4,4] float64. Neighbours and ends depend on each other."""
    generator = torch.Generator().manual_seed(0)
    pairs = [torch.randn(NUM_WORDS, NUM_WORDS, generator=generator, dtype=torch.float64) for _ in range(3)]
    logits = pairs[0][:, :, None] + pairs[1][None] + pairs[2][:, None, :]
    return logits.flatten().softmax(0).view(NUM_WORDS, NUM_WORDS, NUM_WORDS)


def exact_log_probs(sentence: tuple[int, ...], table: torch.Tensor) -> list[float]:
    """log P(x_t | the two others): the sentence's probability over the sum of all that differ in that word alone."""
    found = []
    for position in range(3):
        variants = [(*sentence[:position], word, *sentence[position + 1 :]) for word in range(NUM_WORDS)]
        found.append((table[sentence] / sum(table[variant] for variant in variants)).log().item())
    return found


def tokens_of(dictionary) -> torch.Tensor:
    """All sentences: [64,5]."""
    return torch.tensor([[dictionary.bos(), *(4 + word for word in words), dictionary.eos()] for words in SENTENCES])


def train(model: MlmModel, tokens: torch.Tensor, mask: int, table: torch.Tensor) -> None:
    """Minimise the loss over all sentences [64,5], each word masked in turn and weighted by P: no sampling.

    Sentences that differ in the masked word alone are one context, with several words to predict.
    """
    texts = tokens.repeat_interleave(3, dim=0)
    positions = torch.tensor([1, 2, 3]).repeat(len(tokens))[:, None]
    contexts, context_of = texts.scatter(1, positions, mask).unique(dim=0, return_inverse=True)
    masked = contexts.eq(mask).int().argmax(1, keepdim=True)
    weights = torch.zeros(len(contexts), model.vocabulary.padded_size)
    weights[context_of, texts.gather(1, positions)[:, 0]] = table.flatten().float().repeat_interleave(3)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.02, STEPS)
    batch = PretrainingBatch(contexts, contexts, masked, torch.ones_like(masked), has_padding=False)
    for _ in range(STEPS):
        logits = model.logits(model.generate(batch), model.mlm_head.bias)[:, 0]
        optimizer.zero_grad()
        (-logits.log_softmax(-1) * weights).sum().backward()
        optimizer.step()
        schedule.step()


@pytest.mark.slow
def test_mlm_learns_the_enumerated_conditionals():
    table = joint()
    settings = SCORED_SIZES | {"encoder_embed_dim": 32, "init_std": 0.1, "linear_init_std": 0.1}
    loaded = pretrained(MlmModel, EncoderConfig(**settings), NUM_WORDS)
    tokens = tokens_of(loaded.dictionary)
    likely = [i for i, sentence in enumerate(SENTENCES) if table[sentence] > 0.01]
    exact = torch.tensor([exact_log_probs(SENTENCES[i], table) for i in likely])
    scorer = build_token_scorer(loaded, 4096)

    def scores() -> torch.Tensor:
        found = scorer.log_probs(list(tokens))
        return torch.stack([found[i][1:4] for i in likely])

    assert (scores() - exact).abs().max() > 1, "untrained"
    train(loaded.model, tokens, loaded.dictionary.index("<mask>"), table)
    # What 300 steps leave: 0.02 nats a word.
    assert len(likely) == 16
    assert (scores() - exact).abs().max() < 0.1
    assert (scores().sum(1) - exact.sum(1)).abs().max() < 0.15
