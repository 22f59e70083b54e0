"""What one pretrained model does with one text: the numbers behind ``amos inspect``, without any rendering.

T tokens, M masked positions, K depths, V rows of the vocabulary.
"""

from typing import Any

import torch
from torch import Tensor

from amos_fairseq.checkpoints.read import Pretrained
from amos_fairseq.cli.inspected import Inspection, MaskedToken, Proposal, Token, printable
from amos_fairseq.data.masked_blocks import MaskedBlockDataset
from amos_fairseq.errors import UserError
from amos_fairseq.tokenization import Tokenizer


@torch.no_grad()
def inspect_text(pretrained: Pretrained, text: str, seed: int, mask_prob: float | None, top: int) -> Inspection:
    """Mask, propose, sample and judge one text.

    Masks are drawn as for a validation block, from ``seed``, and stand at every drawn position, whatever the run's
    treatment; so is the noise of the sample. ``mask_prob`` None is that of the run.

    Raises:
        UserError: the model does not guess masked tokens, or the text is empty or has no token that may be masked.
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
    is_noise = part_of(output, "is_noise")
    return Inspection(
        file=str(pretrained.file),
        num_updates=pretrained.num_updates,
        seed=seed,
        mask_prob=mask_prob,
        depth_names=model.depth_names,
        tokens=read_tokens(pretrained, kept, positions, output),
        masked=[
            masked_token(
                pretrained, int(position), int(kept[position]), logits[:, 0, i], weights[0, i], top,
                candidates=candidates_of(pretrained, output, i), **told_by_main_network(output, i, int(position)),
            )
            for i, position in enumerate(positions)
        ],
        num_left_out=len(tokens) - len(kept),
        positive="" if part_of(output, "rtd_logits") is None else "replaced" if is_noise is None else "noise",
        is_corrupted=part_of(output, "corrupted_tokens") is not None,
        is_masked=not hasattr(model, "token_log_probs"),  # a model that tells all tokens at once must see their neighbours
    )  # fmt: skip


def part_of(output: Any, name: str) -> Tensor | None:
    """A part of a model's output for the one text, None where the objective has none."""
    part = getattr(output, name, None)
    return None if part is None else part[0]


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


def read_tokens(pretrained: Pretrained, original: Tensor, positions: Tensor, output: Any) -> list[Token]:
    """Every token [T] as the main network read it, with what it says of the token."""
    dictionary = pretrained.dictionary
    corrupted, rtd_logits, is_noise, is_scored = (
        part_of(output, name) for name in ("corrupted_tokens", "rtd_logits", "is_noise", "is_scored")
    )
    read = original if corrupted is None else corrupted
    original_pieces, read_pieces = ([dictionary[i] for i in ids.tolist()] for ids in (original, read))
    special = {dictionary.bos(), dictionary.eos(), dictionary.pad()}
    is_special = [i in special for i in original.tolist()]
    masked = set(positions.tolist())
    asked = [True] * len(original) if is_scored is None else is_scored.tolist()
    tells_all = getattr(pretrained.model, "token_log_probs", None)
    columns = (
        original_pieces,
        read_pieces,
        surfaces(pretrained.tokenizer, read_pieces, is_special),
        surfaces(pretrained.tokenizer, original_pieces, is_special),
        [position in masked for position in range(len(original))],
        is_special,
        values_where(asked, None if rtd_logits is None else rtd_logits.sigmoid()),
        (read.ne(original) if is_noise is None else is_noise).tolist(),
        values_where(asked, None if tells_all is None else tells_all(read[None])[0]),
    )
    return [Token(*values) for values in zip(*columns, strict=True)]


def values_where(asked: list[bool], values: Tensor | None) -> list[float | None]:
    """[T] as numbers, None where nobody asked, or where there are none at all."""
    if values is None:
        return [None] * len(asked)
    return [value if is_asked else None for value, is_asked in zip(values.tolist(), asked, strict=True)]


def candidates_of(pretrained: Pretrained, output: Any, index: int) -> list[Proposal]:
    """Multi-word selection at one masked token: the original, its rivals, and the softmax over them."""
    candidates, logits = part_of(output, "candidates"), part_of(output, "mws_logits")
    if candidates is None or logits is None:
        return []
    pairs = zip(candidates[index].tolist(), logits[index].softmax(-1).tolist(), strict=True)
    return [Proposal(pretrained.dictionary[token], probability) for token, probability in pairs]


def told_by_main_network(output: Any, index: int, position: int) -> dict[str, float]:
    """What a main network that tells originals gives to one masked token; nothing for one that detects."""
    predictions = getattr(output, "predictions", None)
    if predictions is None:
        return {}
    of_all_tokens = predictions.nll.size(1) == output.corrupted_tokens.size(1)
    place = (0, position if of_all_tokens else index)
    told = {"told_probability": float((-predictions.nll[place]).exp())}
    if predictions.copy_probs is not None:
        told["copy_probability"] = float(predictions.copy_probs[place])
    return told


def masked_token(
    pretrained: Pretrained,
    position: int,
    original: int,
    logits: Tensor,
    weights: Tensor,
    top: int,
    **others: Any,
) -> MaskedToken:
    """The ``top`` proposals of each depth from its logits [K,V], and its probability of the original token.

    Rows that the generator never samples (special symbols, padding rows) are no proposals, but have their part in the
    softmax, as in training. ``others`` are further fields of :class:`MaskedToken`.
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
        **others,
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
