"""What a model computes for one text, as plain values, and the table and the summary that terminal and page show.

Fields that an objective does not have are empty.
"""

from dataclasses import dataclass, field
from typing import NamedTuple


class Prediction(NamedTuple):
    """A vocabulary piece with its probability."""

    piece: str
    probability: float


class DepthSample(NamedTuple):
    """A replacement token that one depth has sampled.

    Attributes:
        text: as a reader sees it; a hyphen precedes a piece that continues a word.
        positive_probability: the discriminator's probability of the positive class; None without one that detects tokens.
    """

    piece: str
    text: str
    positive_probability: float | None


class CellLine(NamedTuple):
    """One line in a cell of the table of masked tokens; ``is_original`` marks the token of the text among predictions."""

    text: str
    probability: float | None = None
    is_original: bool = False


@dataclass(frozen=True)
class Token:
    """One token of the main network's input.

    Attributes:
        original: piece of the text.
        input: piece that the main network gets: the sampled one, or the original.
        original_text, input_text: the part of the readable text that each adds, spaces included.
        masked: whether the generator predicts this position.
        is_positive: whether the label is the positive class: replaced or, for Electric, noise, which includes samples that
            equal the original.
        positive_probability: the discriminator's probability of the positive class; None without a discriminator, and
            for special tokens where training computes no loss for them (Electric).
        log_prob: log p(input token | the rest) in nats, for models that compute it for all tokens at once; None for special
            tokens.
    """

    original: str
    input: str
    original_text: str
    input_text: str
    masked: bool
    special: bool
    is_positive: bool
    positive_probability: float | None
    log_prob: float | None

    @property
    def replaced(self) -> bool:
        return self.input != self.original

    @property
    def flagged(self) -> bool:
        """Whether the discriminator predicts the positive class, at the threshold of the logged accuracy."""
        return self.positive_probability is not None and self.positive_probability > 0.5

    @property
    def verdict(self) -> str:
        """Compare the discriminator's prediction with the label."""
        if self.is_positive:
            return "detected" if self.flagged else "missed"
        return "false alarm" if self.flagged else "trusted"


@dataclass(frozen=True)
class MaskedToken:
    """The predictions of the generator for one masked token.

    Attributes:
        mixture_weights: [K], one per depth.
        predictions: [K] lists of the most probable pieces, in descending order.
        original_probabilities: [K], the probability of the original token.
        samples: [K], if asked for, of a model that samples replacements: one for each depth, all masked tokens replaced by
            that depth.
        candidates: of multi-word selection: the original and its negatives, with the discriminator's probabilities.
        discriminator_probability: of a discriminator that predicts tokens: its probability of the original.
        copy_probability: of the same with a copy mechanism: its probability of copying the input.
    """

    position: int
    mixture_weights: list[float]
    predictions: list[list[Prediction]]
    original_probabilities: list[float]
    samples: list[DepthSample] = field(default_factory=list)
    candidates: list[Prediction] = field(default_factory=list)
    discriminator_probability: float | None = None
    copy_probability: float | None = None

    @property
    def best_candidate(self) -> Prediction:
        return max(self.candidates, key=lambda candidate: candidate.probability)


@dataclass(frozen=True)
class Inspection:
    """One text with everything that the model computes for it.

    Attributes:
        num_truncated: tokens of the text beyond the maximum input of the model.
        positive_class: what the discriminator detects, "replaced" or "noise"; empty without a discriminator.
        is_corrupted: whether the main network's input has sampled tokens.
        is_masked: whether <mask> hides the selected tokens from the generator (two-tower generators need no mask).
    """

    file: str
    num_updates: int
    seed: int
    mask_prob: float
    depth_names: list[str]
    tokens: list[Token]
    masked: list[MaskedToken]
    num_truncated: int
    positive_class: str
    is_corrupted: bool
    is_masked: bool

    @property
    def has_log_probs(self) -> bool:
        return any(token.log_prob is not None for token in self.tokens)

    @property
    def has_candidates(self) -> bool:
        return any(masked.candidates for masked in self.masked)

    @property
    def selected(self) -> str:
        """The participle that describes the tokens which the generator predicts."""
        return "masked" if self.is_masked else "selected for noise" if self.positive_class else "selected"

    def row(self, masked: MaskedToken) -> dict[str, list[CellLine]]:
        """Return the row of a masked token in the table, by column: what the objective has."""
        token = self.tokens[masked.position]
        cells = {"#": [CellLine(str(masked.position))], "original": [CellLine(token.original)]}
        for depth, name in enumerate(self.depth_names):
            lines = [CellLine(*one, one.piece == token.original) for one in masked.predictions[depth]]
            if not any(line.is_original for line in lines):
                lines.append(CellLine(token.original, masked.original_probabilities[depth], True))
            if len(self.depth_names) > 1:  # a single depth always has weight 1
                lines.insert(0, CellLine("weight", masked.mixture_weights[depth]))
            cells[f"depth {name}"] = lines
        if self.has_candidates:
            cells["selection"] = [
                CellLine(
                    f"{one.piece} (chosen)" if one is masked.best_candidate else one.piece,
                    one.probability,
                    one is masked.candidates[0],
                )
                for one in masked.candidates
            ]
        if self.is_corrupted:
            cells["sampled"] = [CellLine(token.input)]
        if masked.discriminator_probability is not None:
            cells["main network"] = [CellLine(f"p(original) {percent(masked.discriminator_probability)}")]
            if masked.copy_probability is not None:
                cells["main network"].append(CellLine(f"copies {percent(masked.copy_probability)}"))
        if self.positive_class:
            cells[f"P({self.positive_class})"] = [CellLine(token.verdict, token.positive_probability)]
        if self.has_log_probs:
            cells["log p"] = [CellLine(f"{token.log_prob:.2f}")]
        return cells

    def facts(self, token: Token) -> str:
        """Return the values of one token of the input in one line."""
        facts = [token.original]
        if token.masked and self.is_corrupted:
            facts = [f"original {token.original}, sampled {token.input}"]
        if token.positive_probability is not None:
            facts.append(f"P({self.positive_class}) {percent(token.positive_probability)}: {token.verdict}")
        if token.log_prob is not None:
            facts.append(f"log p {token.log_prob:.2f}")
        return "; ".join(facts)

    def summary(self) -> list[str]:
        """Return the settings and the counts as sentences."""
        counts = f"{len(self.masked)} of {len(self.tokens)} tokens {self.selected}"
        if self.positive_class:
            positive = [token for token in self.tokens if token.is_positive]
            negative = [
                token for token in self.tokens if not token.is_positive and token.positive_probability is not None
            ]
            counts += (
                f", {sum(token.replaced for token in self.tokens)} replaced; {sum(token.flagged for token in positive)} of "
                f"{len(positive)} {self.positive_class} tokens detected, {sum(token.flagged for token in negative)} false "
                f"alarms on {len(negative)} original tokens"
            )
        else:
            pairs = [(masked.predictions[-1][0].piece, self.tokens[masked.position].original) for masked in self.masked]
            counts += f", {sum(predicted == original for predicted, original in pairs)} predicted correctly"
        lines = [
            f"{self.file}, {self.num_updates} updates; seed {self.seed}, mask probability {self.mask_prob:g}",
            counts,
        ]
        if self.has_candidates:
            right = sum(masked.candidates[0] == masked.best_candidate for masked in self.masked)
            lines.append(f"multi-word selection: the original chosen at {right} of {len(self.masked)} masked tokens")
        if self.num_truncated:
            lines.append(
                f"the last {self.num_truncated} tokens of the text are left out: they exceed the model's maximum input"
            )
        return lines


def percent(probability: float) -> str:
    """Format a probability in percent with two significant digits, or with one decimal near 100 %; up to 7 characters."""
    value = 100 * probability
    if value < 0.01:
        return "<0.01 %"
    if value > 99.95:
        return ">99.9 %"
    if value >= 99.5:
        return f"{value:.1f} %"
    return f"{value:.0f} %" if value >= 9.95 else f"{value:#.2g} %"
