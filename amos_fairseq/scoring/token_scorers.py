"""log p(x_t | all other tokens) of every token of a text, for each objective that defines it (thesis section 5.4.5).

For minimal pairs also the score that a discriminator gives each token: ``DetectionScorer``.

Shapes: L tokens of a sequence, B sequences of a batch, T tokens of the longest of them, V padded vocabulary size.
"""

import abc
from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
from fairseq.models import BaseFairseqModel
from torch import Tensor
from torch.nn.functional import softplus
from torch.nn.utils.rnn import pad_sequence

from amos_fairseq.checkpoints.read import LoadedCheckpoint
from amos_fairseq.data.block_iterator import batches_by_length
from amos_fairseq.data.phases import read_phases
from amos_fairseq.errors import UserError
from amos_fairseq.functional.replaced_token_detection import log_prob_of_original
from amos_fairseq.models.amos import AmosModel
from amos_fairseq.models.electra import ElectraModel
from amos_fairseq.models.electric import ElectricModel
from amos_fairseq.models.mlm import MlmModel
from amos_fairseq.models.pretraining import PretrainingBatch
from amos_fairseq.models.teams import TeamsModel
from amos_fairseq.text import MASK_SYMBOL

# Tokens [B,T] int64 -> a value for each token [B,T] float32.
ScoreAll = Callable[[Tensor], Tensor]
# A batch with one token of each sequence masked -> the value of that token [B] float32.
ScoreMasked = Callable[[PretrainingBatch], Tensor]
UNTRAINED = "its discriminator was not trained (--discriminator-loss-weight 0)"


class TokenScorer(abc.ABC):
    """A model that scores tokens in their context, in eval mode on one device, in float32: by a forward pass for each piece,
    with that piece masked (``masks_each``), or over the unchanged text (``reads_once``). ``tokens_per_batch`` includes padding.
    """

    masks_each = reads_once = False

    # Heads without which its scores mean nothing.
    needs: ClassVar[frozenset[str]] = frozenset({"mlm_head"})

    def __init__(self, loaded: LoadedCheckpoint, tokens_per_batch: int):
        if missing := self.needs & loaded.is_new:
            raise UserError(
                f"{loaded.file} was imported without {min(missing)}, which is random: import a model that has it (the MLM head "
                "of ELECTRA: --generator DIR), or train this one first"
            )
        self.model: BaseFairseqModel = loaded.model
        self.pad: int = loaded.dictionary.pad()
        self.mask: int = loaded.dictionary.index(MASK_SYMBOL)
        self.tokens_per_batch = tokens_per_batch
        self.device = self.model.never_sampled_mask.device
        self._special = self.model.never_sampled_mask.cpu()

    def num_passes(self, tokens: Tensor) -> int:
        """Return the number of forward passes that a sequence [L] needs."""
        return self.masks_each * int(self.is_scored(tokens).sum()) + self.reads_once

    @abc.abstractmethod
    def log_probs(self, sequences: Sequence[Tensor]) -> list[Tensor]:
        """Map sequences [L] int64 to log-probabilities [L] float32, in nats; 0 at special tokens."""

    def is_scored(self, tokens: Tensor) -> Tensor:
        """Return [L] bool: all tokens but special ones have a score."""
        return ~self._special[tokens]

    @torch.no_grad()
    def in_one_pass(self, sequences: Sequence[Tensor], score: ScoreAll) -> list[Tensor]:
        """Apply ``score`` to the sequences: [L] float32 each, 0 at special tokens."""
        results: list[Tensor] = [torch.empty(0)] * len(sequences)
        for batch in batches_by_length([len(tokens) for tokens in sequences], self.tokens_per_batch):
            values = score(self._padded([sequences[index] for index in batch])).cpu()
            for row, index in enumerate(batch):
                results[index] = values[row, : len(sequences[index])].where(self.is_scored(sequences[index]), 0.0)
        return results

    @torch.no_grad()
    def with_each_masked(self, sequences: Sequence[Tensor], score: ScoreMasked) -> list[Tensor]:
        """Apply ``score`` to every token while only that token is masked: [L] float32 each, 0 at special tokens."""
        results = [torch.zeros(len(tokens)) for tokens in sequences]
        masked = [
            (index, position)
            for index, tokens in enumerate(sequences)
            for position in self.is_scored(tokens).nonzero().flatten().tolist()
        ]
        lengths = [len(sequences[index]) for index, _ in masked]
        for batch in batches_by_length(lengths, self.tokens_per_batch):
            tokens = self._padded([sequences[masked[i][0]] for i in batch])
            positions = torch.tensor([[masked[i][1]] for i in batch], device=self.device)
            masked_tokens = tokens.scatter(1, positions, self.mask)
            has_padding = lengths[batch[0]] > lengths[batch[-1]]  # the longest comes first
            weights = torch.ones_like(positions)
            values = score(PretrainingBatch(tokens, masked_tokens, positions, weights, has_padding=has_padding)).cpu()
            for i, value in zip(batch, values, strict=True):
                index, position = masked[i]
                results[index][position] = value
        return results

    def _padded(self, sequences: Sequence[Tensor]) -> Tensor:
        """Return [B,T] on the model's device."""
        return pad_sequence(list(sequences), batch_first=True, padding_value=self.pad).to(self.device)


class OnePassScorer(TokenScorer):
    """Models whose ``token_log_probs`` scores all tokens at once: Electric and its variants."""

    reads_once = True
    needs = frozenset({"mlm_head", "detection_head"})

    def __init__(self, loaded: LoadedCheckpoint, tokens_per_batch: int):
        super().__init__(loaded, tokens_per_batch)
        if self.model.variant != "two_tower" and loaded.criterion.get("discriminator_loss_weight") == 0:
            raise UserError(f"{loaded.file} gives no probability of a token: {UNTRAINED}")

    def log_probs(self, sequences: Sequence[Tensor]) -> list[Tensor]:
        return self.in_one_pass(sequences, self.model.token_log_probs)


class MaskedScorer(TokenScorer):
    """Masked language models. The softmax is that of training: it includes special tokens and the padding of the vocabulary."""

    masks_each = True

    def log_probs(self, sequences: Sequence[Tensor]) -> list[Tensor]:
        return self.with_each_masked(sequences, lambda batch: -self.model(batch).mlm_nll[:, 0])


class ElectraScorer(TokenScorer):
    """log p from the log q of the distribution that replacements are sampled from, the discriminator's logit, and the fraction
    of masked tokens in training: ``amos_fairseq.functional.replaced_token_detection.log_prob_of_original``.

    Departures: if the generator sees the original at some masked positions in training (``--mask-treatment electra``, 15 % of
    them), the training's q differs from this q.
    """

    masks_each = reads_once = True
    needs = frozenset({"mlm_head", "detection_head"})

    def __init__(self, loaded: LoadedCheckpoint, tokens_per_batch: int):
        super().__init__(loaded, tokens_per_batch)
        reason = why_it_cannot_detect(loaded)
        if loaded.model.cfg.disallow_true_token:
            reason = reason or "its generator was never allowed to sample the original (--disallow-true-token)"
        if loaded.task.get("mask_rare_tokens"):
            reason = reason or "rare tokens were sampled more often than others (--mask-rare-tokens)"
        if reason:
            raise UserError(
                f"{loaded.file} gives no probability of a token: {reason}; use plain ELECTRA, mlm or electric"
            )
        task = loaded.task
        self.mask_prob: float = task["mask_prob"]
        if task.get("phases"):  # the discriminator has learned the share of the last one
            self.mask_prob = read_phases(task["phases"], task["tokens_per_sample"], self.mask_prob)[-1].mask_prob

    def log_probs(self, sequences: Sequence[Tensor]) -> list[Tensor]:
        noise = self.with_each_masked(sequences, self._noise_log_probs)
        logits = self.in_one_pass(sequences, lambda tokens: detection_logits(self.model, tokens))
        combined = (log_prob_of_original(*both, self.mask_prob) for both in zip(logits, noise, strict=True))
        return [values.where(self.is_scored(tokens), 0.0) for values, tokens in zip(combined, sequences, strict=True)]

    def _noise_log_probs(self, batch: PretrainingBatch) -> Tensor:
        """Return log q of the originals: [B] float32."""
        hidden = None if self.model.token_noise is not None else self.model.generate(batch)
        log_q = self.model.noise_logits(hidden, batch.originals).log_softmax(-1)  # [B,1,V]
        return log_q.gather(-1, batch.originals.unsqueeze(-1)).flatten()


class DetectionScorer(TokenScorer):
    """Discriminators: log P(original) = log(1 - sigmoid(z)) = -softplus(z) of each token, with the logit z of "replaced".

    It is not the probability of the token, and the sum is not that of a text: a likely token and an unlikely one that no
    generator would sample can have the same score. It orders texts that differ in a few tokens.
    """

    reads_once = True
    needs = frozenset({"detection_head"})

    def __init__(self, loaded: LoadedCheckpoint, tokens_per_batch: int):
        if reason := why_it_cannot_detect(loaded):
            raise UserError(
                f"{loaded.file} has no score for minimal pairs: {reason}; give an electra, teams or amos that detects "
                "replacements at all tokens, or an mlm or electric"
            )
        super().__init__(loaded, tokens_per_batch)

    def log_probs(self, sequences: Sequence[Tensor]) -> list[Tensor]:
        return self.in_one_pass(sequences, lambda tokens: -softplus(detection_logits(self.model, tokens)))


def detection_logits(model: ElectraModel | TeamsModel | AmosModel, tokens: Tensor) -> Tensor:
    """Compute the discriminator's logits of a text [B,T] int64: [B,T] float32, positive for "replaced". TEAMS detects in its
    own branch, whichever fine-tuning would use."""
    if isinstance(model, TeamsModel):
        _, states = model.discriminate(tokens, tokens.eq(model.vocabulary.pad))
    else:
        states = model.extract_features(tokens)
    return model.detection_head(states)


def why_it_cannot_detect(loaded: LoadedCheckpoint) -> str | None:
    """Return why a model with a discriminator was not trained to detect replacements at all tokens; None if it was."""
    model = loaded.model
    if isinstance(model, ElectraModel) and str(model.cfg.main_objective) != "detection":
        return f"its main network is not trained to detect replacements (--main-objective {model.cfg.main_objective})"
    if isinstance(model, TeamsModel) and "rtd" not in model.tasks:
        return "it was trained without replaced token detection (--rtd-loss-weight 0)"
    if loaded.criterion.get("discriminator_loss_weight") == 0:  # TEAMS has rtd_loss_weight
        return UNTRAINED
    if str(loaded.criterion.get("detection_positions", "all")) == "masked":
        return "it was trained at masked positions only (--detection-positions masked), where every token is sampled"
    return None


def build_token_scorer(loaded: LoadedCheckpoint, tokens_per_batch: int) -> TokenScorer:
    """Build the scorer of a model; refuse an objective that gives no probability of a token, and a fine-tuned model."""
    model = loaded.model
    for model_class, scorer in (
        (ElectraModel, ElectraScorer),
        (ElectricModel, OnePassScorer),
        (MlmModel, MaskedScorer),
    ):
        if isinstance(model, model_class):
            return scorer(loaded, tokens_per_batch)
    raise UserError(
        f"{loaded.file} holds a model of the class {type(model).__name__}, which gives no probability of a token: amos score "
        "needs a pretraining checkpoint of the objectives mlm, electra or electric"
    )


def build_pair_scorer(loaded: LoadedCheckpoint, tokens_per_batch: int) -> TokenScorer:
    """Build the scorer of minimal pairs: the PLL of mlm and electric, detection for the others; refuse what has neither."""
    if isinstance(loaded.model, ElectraModel | TeamsModel | AmosModel):
        return DetectionScorer(loaded, tokens_per_batch)
    return build_token_scorer(loaded, tokens_per_batch)
