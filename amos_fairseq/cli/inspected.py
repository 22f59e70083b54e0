"""What ``amos inspect`` found, as plain values for whoever draws it. An objective leaves empty what it does not have."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Prediction:
    piece: str
    probability: float


@dataclass(frozen=True)
class Token:
    """One token as the main network read it.

    Attributes:
        surface: its part of the readable text, spaces included.
        flagged_probability: what the discriminator gives to its positive class; None without a discriminator, and for
            special tokens where training never asks about them (Electric).
        is_positive: of that class: replaced, or, for Electric, noise, even where the sample is the original.
        log_prob: log p(token read | the rest), nats, of models that tell it of all tokens but special ones at once.
    """

    original: str
    read: str
    surface: str
    original_surface: str
    masked: bool
    special: bool
    flagged_probability: float | None
    is_positive: bool
    log_prob: float | None

    @property
    def replaced(self) -> bool:
        return self.read != self.original

    @property
    def accused(self) -> bool:
        """The discriminator's answer at the threshold that the logged accuracy uses."""
        return self.flagged_probability is not None and self.flagged_probability > 0.5

    @property
    def verdict(self) -> str:
        if self.is_positive:
            return "detected" if self.accused else "missed"
        return "false alarm" if self.accused else "trusted"


@dataclass(frozen=True)
class MaskedToken:
    """What the generator proposes for one masked token; lists of K, by depth."""

    position: int
    weights: list[float]
    proposals: list[list[Prediction]]
    original_probabilities: list[float]
    # Multi-word selection: the original and its rivals, each with the probability that the discriminator gives it.
    candidates: list[Prediction] = field(default_factory=list)
    # Of a main network that tells originals instead of detecting: its probability of the original, and that it copies.
    told_probability: float | None = None
    copy_probability: float | None = None


@dataclass(frozen=True)
class Inspection:
    """``positive``: what the discriminator flags, "replaced" or "noise"; empty where there is none."""

    file: str
    num_updates: int
    seed: int
    mask_prob: float
    depth_names: list[str]
    tokens: list[Token]
    masked: list[MaskedToken]
    num_left_out: int
    positive: str
    is_corrupted: bool  # the main network reads sampled tokens
    is_masked: bool  # False: positions were drawn, but nothing was hidden behind <mask> (two-tower generators)

    @property
    def has_log_probs(self) -> bool:
        return any(token.log_prob is not None for token in self.tokens)

    @property
    def has_candidates(self) -> bool:
        return any(masked.candidates for masked in self.masked)

    @property
    def tells_originals(self) -> bool:
        return self.masked[0].told_probability is not None

    @property
    def mixes(self) -> bool:
        """Whether several depths are mixed; one alone always has the weight 1."""
        return len(self.depth_names) > 1

    @property
    def chosen(self) -> str:
        """The word for the tokens that the generator guesses."""
        return "masked" if self.is_masked else "drawn for noise" if self.positive else "drawn"

    def summary(self) -> list[str]:
        """What happened, in sentences with numbers."""
        lines = [
            f"{self.file}, {self.num_updates} updates; seed {self.seed}, mask probability {self.mask_prob:g}",
            self._outcome(),
        ]
        if self.has_candidates:
            right = sum(masked.candidates[0] == best_of(masked.candidates) for masked in self.masked)
            lines.append(f"multi-word selection: the original chosen at {right} of {len(self.masked)} masked tokens")
        if self.num_left_out:
            lines.append(f"the last {self.num_left_out} tokens of the text are left out: the model reads no more")
        return lines

    def _outcome(self) -> str:
        number = f"{len(self.masked)} of {len(self.tokens)} tokens {self.chosen}"
        if not self.positive:
            pairs = [(masked.proposals[-1][0].piece, self.tokens[masked.position].original) for masked in self.masked]
            return f"{number}, {sum(guess == original for guess, original in pairs)} guessed right"
        positive = [token for token in self.tokens if token.is_positive]
        kept = [token for token in self.tokens if not token.is_positive and token.flagged_probability is not None]
        detected, alarms = sum(token.accused for token in positive), sum(token.accused for token in kept)
        return (
            f"{number}, {sum(token.replaced for token in self.tokens)} replaced; {detected} of {len(positive)} "
            f"{self.positive} tokens detected, {alarms} false alarms on {len(kept)} original tokens"
        )


def best_of(candidates: list[Prediction]) -> Prediction:
    return max(candidates, key=lambda candidate: candidate.probability)


def told_lines(masked: MaskedToken) -> list[str]:
    lines = [f"p(original) {masked.told_probability:.3f}"]
    return lines if masked.copy_probability is None else [*lines, f"copies {masked.copy_probability:.3f}"]


def printable(text: str) -> str:
    """Control characters could steer a terminal; they become U+FFFD."""
    return "".join(character if character.isprintable() else "\ufffd" for character in text)
