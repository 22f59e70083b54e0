"""The result of inspecting one text, as plain values for the terminal and for pages, and the table that both draw.

Fields that an objective does not have are empty.
"""

from dataclasses import dataclass, field
from typing import NamedTuple


@dataclass(frozen=True)
class Prediction:
    """A vocabulary piece with its probability."""

    piece: str
    probability: float


class CellLine(NamedTuple):
    """One line in a cell of the table of masked tokens.

    Attributes:
        probability: shown before the text; None without one.
        style: words: "original" and "chosen" of predictions, "weight", "piece", "verdict", and "bold" or "italic" for the
            terminal.
    """

    text: str
    probability: float | None = None
    style: str = ""


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
    input_text: str
    original_text: str
    masked: bool
    special: bool
    positive_probability: float | None
    is_positive: bool
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
class DepthSample:
    """A replacement token that one depth has sampled.

    Attributes:
        text: the part of the readable text that it would add in its place, with the space before a word.
        positive_probability: the discriminator's probability of the positive class; None without one that detects tokens.
    """

    piece: str
    text: str
    positive_probability: float | None

    @property
    def shown(self) -> str:
        """The text, with a hyphen before a piece that continues a word."""
        word = self.text.strip() or self.piece
        return word if self.text.startswith(" ") else f"-{word}"


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
    def predicts_tokens(self) -> bool:
        """Whether the discriminator predicts the original tokens instead of detecting replaced ones."""
        return self.masked[0].discriminator_probability is not None

    @property
    def has_mixture(self) -> bool:
        """Whether several depths are mixed; a single depth always has weight 1."""
        return len(self.depth_names) > 1

    @property
    def selected(self) -> str:
        """The participle that describes the tokens which the generator predicts."""
        return "masked" if self.is_masked else "selected for noise" if self.positive_class else "selected"

    def row(self, masked: MaskedToken) -> dict[str, list[CellLine]]:
        """Return the row of a masked token in the table, by column: what the objective has."""
        token = self.tokens[masked.position]
        cells = {
            "position": [CellLine(str(masked.position))],
            "original": [CellLine(token.original, style="bold piece")],
        }
        columns = zip(self.depth_names, masked.predictions, masked.original_probabilities, strict=True)
        for (name, predictions, original), weight in zip(columns, masked.mixture_weights, strict=True):
            pairs = [(one.piece, one.probability) for one in predictions]
            lines = [CellLine(*pair, "original bold" * (pair[0] == token.original)) for pair in pairs]
            if not any(line.style for line in lines):
                lines.append(CellLine(token.original, original, "original italic"))
            cells[f"depth {name}"] = [CellLine("weight", weight, "weight")] * self.has_mixture + lines
        if self.has_candidates:
            best, (first, *_) = masked.best_candidate, masked.candidates
            cells["selection"] = [
                CellLine(one.piece, one.probability, "original " * (one is first) + "bold chosen" * (one is best))
                for one in masked.candidates
            ]
        if self.is_corrupted:
            cells["sampled"] = [CellLine(token.input, style="piece")]
        if self.predicts_tokens:
            cells["main network"] = [CellLine(f"p(original) {percent(masked.discriminator_probability)}")]
            if masked.copy_probability is not None:
                cells["main network"].append(CellLine(f"copies {percent(masked.copy_probability)}"))
        if self.positive_class:
            cells[f"P({self.positive_class})"] = [CellLine(token.verdict, token.positive_probability, "verdict")]
        if self.has_log_probs:
            cells["log p"] = [CellLine(f"{token.log_prob:.2f}")]
        return cells

    def summary(self) -> list[str]:
        """Return the settings and the counts as sentences."""
        lines = [
            f"{self.file}, {self.num_updates} updates; seed {self.seed}, mask probability {self.mask_prob:g}",
            self._counts(),
        ]
        if self.has_candidates:
            right = sum(masked.candidates[0] == masked.best_candidate for masked in self.masked)
            lines.append(f"multi-word selection: the original chosen at {right} of {len(self.masked)} masked tokens")
        if self.num_truncated:
            lines.append(
                f"the last {self.num_truncated} tokens of the text are left out: they exceed the model's maximum input"
            )
        return lines

    def _counts(self) -> str:
        selected = f"{len(self.masked)} of {len(self.tokens)} tokens {self.selected}"
        if not self.positive_class:
            pairs = [(masked.predictions[-1][0].piece, self.tokens[masked.position].original) for masked in self.masked]
            return f"{selected}, {sum(predicted == original for predicted, original in pairs)} predicted correctly"
        positive = [token for token in self.tokens if token.is_positive]
        negative = [token for token in self.tokens if not token.is_positive and token.positive_probability is not None]
        detected, alarms = sum(token.flagged for token in positive), sum(token.flagged for token in negative)
        return (
            f"{selected}, {sum(token.replaced for token in self.tokens)} replaced; {detected} of {len(positive)} "
            f"{self.positive_class} tokens detected, {alarms} false alarms on {len(negative)} original tokens"
        )


def probability_colour(probability: float) -> str:
    """Return a color "#rrggbb" from white at 0 to orange at 1: the background of a token by its probability of the positive
    class. Black text is readable on all of them."""
    white, orange = (255, 255, 255), (230, 159, 0)
    mixed = (round(w + (o - w) * probability) for w, o in zip(white, orange, strict=True))
    return "#{:02x}{:02x}{:02x}".format(*mixed)


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


def printable(text: str) -> str:
    """Replace control characters, which could steer a terminal, by U+FFFD."""
    return "".join(character if character.isprintable() else "\ufffd" for character in text)
