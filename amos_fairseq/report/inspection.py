"""What a pretrained model computes on text: predictions, samples and detection (AMOS Table 9), and the discriminator's loss on
the tokens that each generator depth has replaced (Figure 1a).

B blocks, T tokens per block, M masked positions, K depths. Fields that an objective does not have are empty.
"""

import contextlib
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from fairseq.data import data_utils
from torch import Tensor
from torch.nn.functional import softplus

from amos_fairseq.checkpoints.read import LoadedCheckpoint
from amos_fairseq.data.corpus import read_blocks, require_split
from amos_fairseq.data.masked_blocks import MaskedBlockDataset
from amos_fairseq.data.seeding import Purpose, noise_seed
from amos_fairseq.errors import UserError
from amos_fairseq.models.amos import AmosModel
from amos_fairseq.models.electric import ElectricModel
from amos_fairseq.models.pretraining import PretrainingBatch, PretrainingModel
from amos_fairseq.modules.mixture import MixtureWeights
from amos_fairseq.output.terminal import progress_bar
from amos_fairseq.text.tokenization.tokenizer import Tokenizer

TOKENS_AT_ONCE = 4096  # in one forward pass
LONGEST_TEXT = 1_000_000  # characters that are encoded, several times what the losses need
LINES_TOGETHER = 100  # of a group


class Prediction(NamedTuple):
    text: str  # the piece
    probability: float
    is_original: bool  # it is the token of the text


@dataclass(frozen=True)
class Token:
    original: str  # piece of the text
    input: str  # piece that the main network gets: the sampled one, or the original
    original_text: str  # what the piece adds to the readable text, spaces included
    input_text: str
    masked: bool  # the generator predicts this position
    special: bool
    is_positive: bool  # the label: replaced or, for Electric, noise, which includes samples that equal the original
    # By the discriminator; None without one, and for special tokens where training computes no loss for them (Electric).
    positive_probability: float | None

    @property
    def replaced(self) -> bool:
        return self.input != self.original

    @property
    def flagged(self) -> bool:
        """Whether the discriminator predicts the positive class, at the threshold of the logged accuracy."""
        return self.positive_probability is not None and self.positive_probability > 0.5


@dataclass(frozen=True)
class MaskedToken:
    position: int
    mixture_weights: list[float]  # [K]
    # [K] lists of the most probable pieces, in descending order, and of the original after them where it is not among them.
    predictions: list[list[Prediction]]
    # [K], as a reader sees them: the sample of each depth, where that depth replaces all masked tokens; the most probable piece
    # if the model replaces none. A hyphen precedes a piece that continues a word, a check mark follows a replaced token that
    # the discriminator finds.
    shown: list[str]


@dataclass(frozen=True)
class Inspection:
    depth_names: list[str]
    tokens: list[Token]
    masked: list[MaskedToken]
    num_truncated: int  # tokens of the text beyond the maximum input of the model
    positive_class: str  # what the discriminator detects, "replaced" or "noise"; empty without a discriminator
    # How the page calls the tokens that the generator predicts: "masked", or "selected" for Electric, which hides none.
    selected: str

    @property
    def summary(self) -> str:
        counts = f"{len(self.masked)} of {len(self.tokens)} tokens {self.selected}, "
        if self.positive_class:
            positive = [token for token in self.tokens if token.is_positive]
            others = [
                token for token in self.tokens if not token.is_positive and token.positive_probability is not None
            ]
            counts += (
                f"{sum(token.replaced for token in self.tokens)} replaced; {sum(token.flagged for token in positive)} of "
                f"{len(positive)} {self.positive_class} tokens detected, {sum(token.flagged for token in others)} false alarms "
                f"on {len(others)} original tokens"
            )
        else:
            right = sum(masked.predictions[-1][0].is_original for masked in self.masked)
            counts += f"{right} predicted correctly"
        if self.num_truncated:
            counts += f"; the last {self.num_truncated} tokens exceed the model's maximum input and are left out"
        return counts


@torch.no_grad()
def inspect_text(loaded: LoadedCheckpoint, text: str, seed: int, top: int = 3) -> Inspection:
    """Mask one text, predict and sample the masked tokens, and run the discriminator.

    Masked positions are those of a validation block, all replaced by <mask>, with the run's ``mask_prob``. Tokens that are
    never sampled are not among the ``top`` predictions, but are part of the softmax, as in training.
    """
    model = loaded.model
    all_tokens = loaded.tokens(text)
    tokens = all_tokens[: model.max_positions()]
    batch = mask_block(loaded, tokens, seed)
    if not batch["num_masked"]:
        raise UserError("no token of the text may be masked, all are unknown to the vocabulary: give another text")
    inputs = batch["net_input"]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        logits, weights = model.predict_logits(PretrainingBatch(**inputs))
        torch.manual_seed(seed)  # so that a sampled mixture is the same in both calls
        output = model(PretrainingBatch(**inputs))
    by_depth = []
    if _field(output, "sampled_tokens") is not None:
        by_depth = [forward_of_depth(model, inputs, depth, seed) for depth in range(len(model.depth_names))]
    masked = []
    for index, position in enumerate(inputs["masked_positions"][0].tolist()):
        predictions = _most_probable(loaded, logits[:, 0, index].softmax(-1), int(tokens[position]), top)
        shown = _shown(loaded, tokens, [lines[0].text for lines in predictions], by_depth, index, position)
        masked.append(MaskedToken(position, weights[0, index].tolist(), predictions, shown))
    noise_class = "replaced" if _field(output, "is_noise") is None else "noise"
    return Inspection(
        depth_names=model.depth_names,
        tokens=_tokens(loaded, tokens, {token.position for token in masked}, output),
        masked=masked,
        num_truncated=len(all_tokens) - len(tokens),
        positive_class="" if _field(output, "rtd_logits") is None else noise_class,
        selected="selected" if isinstance(model, ElectricModel) else "masked",
    )


def text_of_corpus(loaded: LoadedCheckpoint) -> str:
    """Return the first paragraph of 30 to 100 known tokens of the run's validation text."""
    path = validation_split(loaded)
    require_split(path, "give a text with --sentence")
    lines = data_utils.load_indexed_dataset(path, loaded.dictionary)
    for index in range(len(lines)):
        ids = lines[index].tolist()[:-1]  # without </s>
        if 30 <= len(ids) <= min(100, loaded.model.max_positions() - 2) and loaded.dictionary.unk() not in ids:
            return loaded.tokenizer.decode([loaded.dictionary[i] for i in ids]).strip()
    raise UserError(f"{path} has no paragraph to show: give a text with --sentence")


def mask_block(loaded: LoadedCheckpoint, tokens: Tensor, seed: int) -> dict:
    """Return a batch of one block [1,T] with its masked positions [1,M], masked by the code that training uses."""
    masking = {"tokens_per_block": len(tokens), "mask_prob": loaded.task["mask_prob"], "seed": seed}
    blocks = [tokens[1:]]  # the dataset prepends <s>
    dataset = MaskedBlockDataset(blocks, loaded.dictionary, **masking, training=False)
    batch = dataset.collater([dataset[0]])
    for name in ("masked_positions", "masked_weights"):
        batch["net_input"][name] = batch["net_input"][name][:, : batch["num_masked"]]
    return batch


def _field(output: Any, name: str) -> Tensor | None:
    """Return a field of the model output for the only sequence of the batch, None where the objective has none."""
    value = getattr(output, name, None)
    return None if value is None else value[0]


def _most_probable(loaded: LoadedCheckpoint, probabilities: Tensor, original: int, top: int) -> list[list[Prediction]]:
    """Return :attr:`MaskedToken.predictions` by the probabilities [K,V] of one masked token."""
    can_be_sampled = ~loaded.model.never_sampled_mask
    best = probabilities.where(can_be_sampled, -1.0).topk(min(top, int(can_be_sampled.sum())), dim=-1).indices
    predictions = []
    for shares, ids in zip(probabilities, best.tolist(), strict=True):
        shown = ids if original in ids else [*ids, original]
        predictions.append([Prediction(loaded.dictionary[i], shares[i].item(), i == original) for i in shown])
    return predictions


def _tokens(loaded: LoadedCheckpoint, original: Tensor, masked: set[int], output: Any) -> list[Token]:
    """Return every token [T] of the main network's input, with what the model predicts for it."""
    dictionary = loaded.dictionary
    names = ("corrupted_tokens", "rtd_logits", "is_noise", "is_scored")
    corrupted, rtd_logits, is_noise, is_scored = (_field(output, name) for name in names)
    inputs = original if corrupted is None else corrupted
    is_positive = inputs.ne(original) if is_noise is None else is_noise
    pieces, input_pieces = ([dictionary[i] for i in ids.tolist()] for ids in (original, inputs))
    special = [i in (dictionary.bos(), dictionary.eos(), dictionary.pad()) for i in original.tolist()]
    texts, input_texts = (surfaces(loaded.tokenizer, each, special) for each in (pieces, input_pieces))
    tokens = []
    for i in range(len(original)):
        scored = is_scored is None or bool(is_scored[i])
        probability = rtd_logits[i].sigmoid().item() if scored and rtd_logits is not None else None
        spellings = (pieces[i], input_pieces[i], texts[i], input_texts[i])
        tokens.append(Token(*spellings, i in masked, special[i], bool(is_positive[i]), probability))
    return tokens


def _shown(
    loaded: LoadedCheckpoint, tokens: Tensor, best: list[str], outputs: Sequence[Any], index: int, position: int
) -> list[str]:
    """Return :attr:`MaskedToken.shown` of one masked token of ``tokens`` [T].

    Args:
        best: [K], the most probable pieces; not shown if there are outputs.
        outputs: [K], of :func:`forward_of_depth`, or none.
    """
    dictionary, shown = loaded.dictionary, []
    starts_line = int(tokens[position - 1]) in (dictionary.bos(), dictionary.eos())
    original, before = dictionary[tokens[position]], dictionary[tokens[position - 1]]
    sampled = [dictionary[_field(output, "sampled_tokens")[index]] for output in outputs]
    for depth, piece in enumerate(sampled or best):
        text = surfaces(loaded.tokenizer, [before, piece], [starts_line, False])[1]
        word = text.strip() or piece
        if not starts_line and not text.startswith(" "):
            word = f"-{word}"
        logits = _field(outputs[depth], "rtd_logits") if outputs else None
        if piece != original and logits is not None and logits[position].sigmoid() > 0.5:
            word += " \u2713"
        shown.append(word)
    return shown


def surfaces(tokenizer: Tokenizer, pieces: list[str], is_special: list[bool]) -> list[str]:
    """Return the part of the decoded text that each piece adds, so that the joined parts equal the text.

    A special token adds nothing, and decoding restarts after it. Where one more piece changes the text before it (several
    bytes of one character), its part is the piece itself.
    """
    texts, pieces_so_far, text = [], [], ""
    for piece, special in zip(pieces, is_special, strict=True):
        if special:
            texts.append("")
            pieces_so_far, text = [], ""
            continue
        pieces_so_far.append(piece)
        longer = tokenizer.decode(pieces_so_far)
        texts.append(longer[len(text) :] if longer.startswith(text) else piece)
        text = longer
    return texts


@dataclass(frozen=True)
class DepthLosses:
    """The discriminator's losses on the replaced tokens of one generator depth."""

    depth: str  # its name in log keys
    losses: np.ndarray  # [N] float64, -log P(replaced) in nats; only sampled tokens that differ from the original
    num_masked: int  # N of them were replaced

    @property
    def recall(self) -> float:
        """Fraction of the replaced tokens with P(replaced) above 1/2; nan for none."""
        return float(np.mean(self.losses < math.log(2))) if len(self.losses) else math.nan


def held_out_blocks(loaded: LoadedCheckpoint, text: str | None) -> Sequence[Tensor]:
    """Return blocks without ``<s>`` of ``text``, or of the run's validation split for None.

    Of a long text, groups of lines at equal distances are encoded.
    """
    size = tokens_per_block(loaded)
    if text is not None:
        every = math.ceil(len(text) / LONGEST_TEXT) or 1
        lines = (line for i, line in enumerate(text.split("\n")) if i // LINES_TOGETHER % every == 0)
        return loaded.tokens("\n".join(lines))[1:].split(size - 1)
    path = validation_split(loaded)
    require_split(path, "give a held-out text with --text FILE")
    return read_blocks(path, loaded.dictionary, size, str(loaded.task.get("sample_break_mode") or "none"))


def validation_split(loaded: LoadedCheckpoint) -> str:
    """Return the path of the run's validation split, without a suffix."""
    return os.path.join(str(loaded.task.get("data") or "").split(os.pathsep)[0], "valid")


def tokens_per_block(loaded: LoadedCheckpoint) -> int:
    """Return T of the run, or the maximum input of the model where the checkpoint does not contain it."""
    longest = loaded.model.max_positions()
    return min(loaded.task.get("tokens_per_sample") or longest, longest)


@torch.no_grad()
def replaced_token_losses(
    loaded: LoadedCheckpoint, blocks: Sequence[Tensor], seed: int, num_masked: int
) -> list[DepthLosses]:
    """Replace the masked tokens by samples of one depth after the other, and compute the discriminator's loss on them.

    For each depth, all masked tokens of a block are samples of its MLM head, and the discriminator reads the whole block. Its
    loss on a replaced token is -log P(replaced) (the second term of AMOS Eq. 1). For Electric it is -log P(noise).

    Blocks at equal distances are used, until they have ``num_masked`` masked tokens. All depths have the same masks, each has
    noise of its own. The result is empty if the model has no discriminator that detects replaced tokens.

    Departures: the paper trains one discriminator with each generator ("we train BERT-Base-sized discriminators with
    4/6/8-layer generators", section 3.2). That is one call for each such run. A model with K depths has a single
    discriminator, which was trained on the mixture of the depths.
    """
    model = loaded.model
    masking = {"tokens_per_block": tokens_per_block(loaded), "mask_prob": loaded.task["mask_prob"], "seed": seed}
    dataset = MaskedBlockDataset(blocks, loaded.dictionary, **masking, training=False)
    num_blocks = min(len(blocks), math.ceil(num_masked / dataset.slots))
    indices = np.linspace(0, len(blocks) - 1, num_blocks).round().astype(int)
    step = max(1, TOKENS_AT_ONCE // dataset.tokens_per_block)
    losses: list[list[Tensor]] = [[] for _ in model.depth_names]
    device, masked = model.embed_tokens.weight.device, 0
    with progress_bar(num_blocks, "losses by depth", "block", delay=2) as bar:
        for start in range(0, num_blocks, step):
            batch = dataset.collater([dataset[index] for index in indices[start : start + step]])
            net_input = {name: tensor.to(device) for name, tensor in batch["net_input"].items()}
            for depth in range(len(losses)):
                output = forward_of_depth(model, net_input, depth, seed, block=start)
                if getattr(output, "rtd_logits", None) is None:
                    return []
                losses[depth].append(softplus(-output.rtd_logits[output.replaced].float()).cpu())
            masked += batch["num_masked"]
            bar.update(batch["nsentences"])
    return [
        DepthLosses(name, torch.cat(losses_of_depth).double().numpy(), masked)
        for name, losses_of_depth in zip(model.depth_names, losses, strict=True)
    ]


def forward_of_depth(
    model: PretrainingModel, net_input: dict[str, Tensor], depth: int, seed: int, block: int = 0
) -> Any:
    """Run the model on a batch with all replacements sampled from one depth, by (seed, depth, block); return its output."""
    device = net_input["tokens"].device
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), _only_depth(model, depth):
        torch.manual_seed(noise_seed(Purpose.VALIDATION_NOISE, seed, depth, block))
        return model(PretrainingBatch(**net_input))


@contextlib.contextmanager
def _only_depth(model: PretrainingModel, depth: int) -> Iterator[None]:
    if not isinstance(model, AmosModel):
        yield
        return
    num_depths, mixture = len(model.depth_names), model.mixture
    weights = [float(other == depth) for other in range(num_depths)]
    model.mixture = MixtureWeights("fixed", num_depths, model.cfg.encoder_embed_dim, weights)
    try:
        yield
    finally:
        model.mixture = mixture
