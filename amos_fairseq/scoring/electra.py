"""Probabilities of tokens from ELECTRA's generator and discriminator together (thesis section 5.4.5)."""

from collections.abc import Sequence

from torch import Tensor

from amos_fairseq.checkpoints.read import Pretrained
from amos_fairseq.errors import UserError
from amos_fairseq.functional.nce import energies_of
from amos_fairseq.functional.replaced_token_detection import log_prob_of_original
from amos_fairseq.interop.checkpoint import Pretrained
from amos_fairseq.scoring.cloze import MaskedCloze


class ElectraCloze(MaskedCloze):
    """The generator reads a sequence once for every piece, which is masked; the discriminator reads it once, as it is.

    log p comes from log q of the distribution that replacements are sampled from, the discriminator's logit, and the share
    of masked tokens in training.

    Args:
        formula: ``exact`` for the labels that ELECTRA learns here, or ``thesis``: see
            :func:`amos_fairseq.functional.replaced_token_detection.log_prob_of_original`.

    Raises:
        UserError: the variant trains no detector of all tokens, or its q is zero at the original.

    Departures: where training shows the generator the original at a masked position (``--mask-treatment electra``, 15 % of
    them), q is not this q.
    """

    def __init__(self, pretrained: Pretrained, tokens_per_batch: int, formula: str):
        super().__init__(pretrained, tokens_per_batch)
        check_variant(pretrained)
        self.share: float = pretrained.task["mask_prob"]
        self.formula = formula

    def num_passes(self, tokens: Tensor) -> int:
        return super().num_passes(tokens) + 1

    def log_probs(self, sequences: Sequence[Tensor]) -> list[Tensor]:
        noise = self.with_each_masked(sequences, self.read_generator)
        logits = self.in_one_pass(sequences, self.read_discriminator)
        combined = map(self.combine, logits, noise)
        return [found.where(self.scored(tokens), 0.0) for found, tokens in zip(combined, sequences, strict=True)]

    def combine(self, logits: Tensor, noise_log_probs: Tensor) -> Tensor:
        if self.formula == "thesis":
            return -energies_of(logits, noise_log_probs, self.share)
        return log_prob_of_original(logits, noise_log_probs, self.share)

    def read_generator(self, tokens: Tensor, masked_tokens: Tensor, positions: Tensor) -> Tensor:
        """log q of the originals: [R] float32."""
        model, hidden = self.model, None
        if model.generator is not None:
            hidden = model.generate(masked_tokens, positions, tokens.eq(self.pad))
        originals = tokens.gather(1, positions)
        log_q = model.noise_logits(hidden, originals).log_softmax(-1)  # [R,1,V]
        return log_q.gather(-1, originals.unsqueeze(-1)).flatten()

    def read_discriminator(self, tokens: Tensor) -> Tensor:
        """Logits [R,T] float32, positive for "replaced"."""
        return self.model.detection_head(self.model.extract_features(tokens))


def check_variant(pretrained: Pretrained) -> None:
    """:class:`UserError` for variants of ELECTRA from which no probability of a token follows."""
    cfg, positions = pretrained.model.cfg, str(pretrained.criterion.get("detection_positions", "all"))
    reason = None
    if str(cfg.main_objective) != "detection":
        reason = f"its main network detects nothing (--main-objective {cfg.main_objective})"
    elif cfg.disallow_true_token:
        reason = "its generator was never allowed to propose the original (--disallow-true-token)"
    elif positions == "masked":
        reason = "it judged masked positions only (--detection-positions masked), where every token is sampled"
    if reason:
        raise UserError(
            f"{pretrained.file} gives no probability of a token: {reason}; take plain ELECTRA, mlm or electric"
        )
