"""What one pretrained model does with one text: the numbers behind ``amos inspect``, without any rendering.

T tokens, M masked positions, K depths, V rows of the vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from amos_fairseq.data.masked_blocks import MaskedBlockDataset
from amos_fairseq.errors import UserError
from amos_fairseq.interop.checkpoint import Pretrained
from amos_fairseq.interop.tokenizer import Tokenizer


@dataclass(frozen=True)
class Proposal:
    piece: str
    probability: float


@dataclass(frozen=True)
class Token:
    """One token as the discriminator read it. ``surface`` is its part of the readable text, spaces included."""

    original: str
    read: str
    surface: str
    original_surface: str
    masked: bool
    special: bool
    replaced_probability: float

    @property
    def replaced(self) -> bool:
        return self.read != self.original

    @property
    def accused(self) -> bool:
        """The discriminator's answer at the threshold that the logged accuracy uses."""
        return self.replaced_probability > 0.5

    @property
    def verdict(self) -> str:
        if self.replaced:
            return "detected" if self.accused else "missed"
        return "false alarm" if self.accused else "trusted"


@dataclass(frozen=True)
class MaskedToken:
    """What the generator proposes for one masked token; lists of K, by depth."""

    position: int
    weights: list[float]
    proposals: list[list[Proposal]]
    original_probabilities: list[float]


@dataclass(frozen=True)
class Inspection:
    file: str
    num_updates: int
    seed: int
    mask_prob: float
    depth_names: list[str]
    tokens: list[Token]
    masked: list[MaskedToken]
    num_left_out: int

    def summary(self) -> list[str]:
        """What happened, in sentences with numbers."""
        replaced = [token for token in self.tokens if token.replaced]
        kept = [token for token in self.tokens if not token.replaced]
        detected, alarms = sum(token.accused for token in replaced), sum(token.accused for token in kept)
        lines = [
            f"{self.file}, {self.num_updates} updates; seed {self.seed}, mask probability {self.mask_prob:g}",
            f"{len(self.masked)} of {len(self.tokens)} tokens masked, {len(replaced)} replaced; {detected} of "
            f"{len(replaced)} replaced tokens detected, {alarms} false alarms on {len(kept)} original tokens",
        ]
        if self.num_left_out:
            lines.append(f"the last {self.num_left_out} tokens of the text are left out: the model reads no more")
        return lines


@torch.no_grad()
def inspect_text(pretrained: Pretrained, text: str, seed: int, mask_prob: float | None, top: int) -> Inspection:
    """Mask, propose, sample and judge one text.

    Masks are drawn as for a validation block, from ``seed``; so is the noise of the sample. ``mask_prob`` None is that of
    the run.

    Raises:
        UserError: the model has no generator, or the text is empty or has no token that may be masked.
    """
    model = pretrained.model
    if not hasattr(model, "propose"):
        raise UserError(
            f"{pretrained.file} holds a model without a generator: inspect needs a checkpoint of pretraining"
        )
    mask_prob = mask_prob or pretrained.task["mask_prob"]
    tokens = pretrained.tokens(text)
    kept = tokens[: model.max_positions()]
    batch = mask_block(pretrained, kept, seed, mask_prob)
    if not batch["num_masked"]:
        raise UserError("no token of the text may be masked, all are unknown to the vocabulary: give another text")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        logits, weights = model.propose(**batch["net_input"])
        torch.manual_seed(seed)  # a mixture that is drawn is drawn alike
        output = model(**batch["net_input"])
    positions = batch["net_input"]["masked_positions"][0]
    return Inspection(
        file=str(pretrained.file),
        num_updates=pretrained.num_updates,
        seed=seed,
        mask_prob=mask_prob,
        depth_names=model.depth_names,
        tokens=judged_tokens(pretrained, kept, output.corrupted_tokens[0], positions, output.rtd_logits[0]),
        masked=[
            masked_token(pretrained, int(position), int(kept[position]), logits[:, 0, i], weights[0, i], top)
            for i, position in enumerate(positions)
        ],
        num_left_out=len(tokens) - len(kept),
    )  # fmt: skip


def mask_block(pretrained: Pretrained, tokens: Tensor, seed: int, mask_prob: float) -> dict:
    """One block [1,T] with its masked positions, by the code that masks for training; no slot is unused."""
    dataset = MaskedBlockDataset(
        [tokens[1:]],  # it puts <s> in front itself
        pretrained.dictionary,
        tokens_per_block=len(tokens),
        mask_prob=mask_prob,
        seed=seed,
        training=False,
    )
    batch = dataset.collater([dataset[0]])
    for name in ("masked_positions", "masked_weights"):
        batch["net_input"][name] = batch["net_input"][name][:, : batch["num_masked"]]
    return batch


def judged_tokens(
    pretrained: Pretrained, original: Tensor, read: Tensor, positions: Tensor, rtd_logits: Tensor
) -> list[Token]:
    """Every token [T] with the probability that the discriminator gives to "replaced"."""
    dictionary = pretrained.dictionary
    original_pieces, read_pieces = ([dictionary[i] for i in ids.tolist()] for ids in (original, read))
    special = {dictionary.bos(), dictionary.eos(), dictionary.pad()}
    is_special = [i in special for i in original.tolist()]
    masked = set(positions.tolist())
    columns = (
        original_pieces,
        read_pieces,
        surfaces(pretrained.tokenizer, read_pieces, is_special),
        surfaces(pretrained.tokenizer, original_pieces, is_special),
        [position in masked for position in range(len(original))],
        is_special,
        rtd_logits.sigmoid().tolist(),
    )
    return [Token(*values) for values in zip(*columns, strict=True)]


def masked_token(
    pretrained: Pretrained, position: int, original: int, logits: Tensor, weights: Tensor, top: int
) -> MaskedToken:
    """The ``top`` proposals of each depth from its logits [K,V], and its probability of the original token.

    Rows that the generator never samples (special symbols, padding rows) are no proposals, but have their part in the
    softmax, as in training.
    """
    probabilities = logits.softmax(-1)
    unsampled = pretrained.model.unsampled_rows
    sampled = probabilities.masked_fill(unsampled, -1.0)  # below every probability
    best = sampled.topk(min(top, int((~unsampled).sum())), dim=-1)
    return MaskedToken(
        position=position,
        weights=weights.tolist(),
        proposals=[
            [Proposal(pretrained.dictionary[i], p) for i, p in zip(ids, values, strict=True)]
            for ids, values in zip(best.indices.tolist(), best.values.tolist(), strict=True)
        ],
        original_probabilities=probabilities[:, original].tolist(),
    )


def surfaces(tokenizer: Tokenizer, pieces: list[str], is_special: list[bool]) -> list[str]:
    """The part of the decoded text that each piece adds, so that the parts joined read as the text does.

    A special token has none; the text after it starts afresh. Where decoding one more piece changes what stood before
    (bytes of one character), the piece itself is shown.
    """
    parts, line, text = [], [], ""
    for piece, special in zip(pieces, is_special, strict=True):
        if special:
            parts.append("")
            line, text = [], ""
            continue
        line.append(piece)
        longer = tokenizer.decode(line)
        parts.append(printable(longer[len(text) :] if longer.startswith(text) else piece))
        text = longer
    return parts


def printable(text: str) -> str:
    """Control characters could steer a terminal; they become U+FFFD."""
    return "".join(character if character.isprintable() else "\ufffd" for character in text)
