"""Compute what one pretrained model does with one text, without any rendering.

T tokens, M masked positions, K depths, V padded vocabulary size.
"""

import os
from typing import Any

import torch
from fairseq.data import data_utils
from torch import Tensor

from amos_fairseq.checkpoints.read import LoadedCheckpoint
from amos_fairseq.data.masked_blocks import MaskedBlockDataset
from amos_fairseq.errors import UserError
from amos_fairseq.models.electric import ElectricModel
from amos_fairseq.models.pretraining import PretrainingBatch, PretrainingModel
from amos_fairseq.report.inspection import DepthSample, Inspection, MaskedToken, Prediction, Token, printable
from amos_fairseq.report.replaced_tokens import forward_of_depth
from amos_fairseq.text.tokenization.tokenizer import Tokenizer


@torch.no_grad()
def inspect_text(
    loaded: LoadedCheckpoint, text: str, seed: int, mask_prob: float | None, top: int, with_samples: bool = False
) -> Inspection:
    """Mask one text, predict and sample the masked tokens, and run the discriminator.

    The masked positions are sampled from ``seed`` as for a validation block, and all of them are replaced by <mask>,
    whatever the mask treatment of the run. ``seed`` also seeds the sampled tokens. ``mask_prob`` None is that of the run.
    ``with_samples`` also fills :attr:`MaskedToken.samples`, by one more forward pass for each depth.

    Raises:
        UserError: the model has no generator, or the text is empty or has no token that may be masked.
    """
    model = loaded.model
    if not isinstance(model, PretrainingModel):
        raise UserError(f"{loaded.file} holds a model without a generator: inspect needs a checkpoint of pretraining")
    mask_prob = mask_prob or loaded.task["mask_prob"]
    all_tokens = loaded.tokens(text)
    tokens = all_tokens[: model.max_positions()]
    batch = mask_block(loaded, tokens, seed, mask_prob)
    if not batch["num_masked"]:
        raise UserError("no token of the text may be masked, all are unknown to the vocabulary: give another text")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        logits, weights = model.predict_logits(PretrainingBatch(**batch["net_input"]))
        torch.manual_seed(seed)  # so that a sampled mixture is the same in both calls
        output = model(PretrainingBatch(**batch["net_input"]))
    depths = range(len(model.depth_names)) if with_samples else ()
    by_depth = [forward_of_depth(model, batch["net_input"], depth, seed) for depth in depths]
    positions = batch["net_input"]["masked_positions"][0]
    is_noise = _field(output, "is_noise")
    return Inspection(
        file=str(loaded.file),
        num_updates=loaded.num_updates,
        seed=seed,
        mask_prob=mask_prob,
        depth_names=model.depth_names,
        tokens=_tokens(loaded, tokens, positions, output),
        masked=[
            _masked_token(
                loaded,
                int(position),
                int(tokens[position]),
                logits[:, 0, i],
                weights[0, i],
                top,
                samples=_samples(loaded, tokens, by_depth, i, int(position)),
                candidates=_candidates(loaded, output, i),
                **_discriminator_prediction(output, i, int(position)),
            )
            for i, position in enumerate(positions)
        ],
        num_truncated=len(all_tokens) - len(tokens),
        positive_class="" if _field(output, "rtd_logits") is None else "replaced" if is_noise is None else "noise",
        is_corrupted=_field(output, "corrupted_tokens") is not None,
        is_masked=not isinstance(model, ElectricModel),  # a model that scores all tokens at once needs their neighbors
    )


def text_of_corpus(loaded: LoadedCheckpoint, flags: str = "--text or --file") -> str:
    """Return a paragraph of the run's validation text, decoded from its tokens: the first one of 30 to 100 known tokens.

    Args:
        flags: of the command that give a text instead, for the message.

    Raises:
        UserError: the corpus is not where the run has read it, or has no such paragraph.
    """
    data = str(loaded.task.get("data") or "").split(os.pathsep)[0]
    path = os.path.join(data, "valid")
    lines = data_utils.load_indexed_dataset(path, loaded.dictionary) if os.path.isfile(f"{path}.idx") else ()
    for index in range(len(lines)):
        ids = lines[index].tolist()[:-1]  # without </s>
        if 30 <= len(ids) <= min(100, loaded.model.max_positions() - 2) and loaded.dictionary.unk() not in ids:
            return loaded.tokenizer.decode([loaded.dictionary[i] for i in ids]).strip()
    raise UserError(f"{path} has no paragraph to show: give a text with {flags}")


def _field(output: Any, name: str) -> Tensor | None:
    """Return a field of the model output for the only sequence of the batch, None where the objective has none."""
    value = getattr(output, name, None)
    return None if value is None else value[0]


def mask_block(loaded: LoadedCheckpoint, tokens: Tensor, seed: int, mask_prob: float) -> dict:
    """Return a batch of one block [1,T] with its masked positions [1,M], masked by the code that training uses."""
    blocks = [tokens[1:]]  # the dataset prepends <s>
    dataset = MaskedBlockDataset(
        blocks, loaded.dictionary, tokens_per_block=len(tokens), mask_prob=mask_prob, seed=seed, training=False
    )
    batch = dataset.collater([dataset[0]])
    for name in ("masked_positions", "masked_weights"):
        batch["net_input"][name] = batch["net_input"][name][:, : batch["num_masked"]]
    return batch


def _tokens(loaded: LoadedCheckpoint, original: Tensor, positions: Tensor, output: Any) -> list[Token]:
    """Return every token [T] of the main network's input, with what the model predicts for it."""
    dictionary = loaded.dictionary
    corrupted, rtd_logits, is_noise, is_scored = (
        _field(output, name) for name in ("corrupted_tokens", "rtd_logits", "is_noise", "is_scored")
    )
    inputs = original if corrupted is None else corrupted
    original_pieces, input_pieces = ([dictionary[i] for i in ids.tolist()] for ids in (original, inputs))
    special = {dictionary.bos(), dictionary.eos(), dictionary.pad()}
    is_special = [i in special for i in original.tolist()]
    masked = set(positions.tolist())
    scored = [True] * len(original) if is_scored is None else is_scored.tolist()
    token_log_probs = loaded.model.token_log_probs if isinstance(loaded.model, ElectricModel) else None
    columns = (
        original_pieces,
        input_pieces,
        surfaces(loaded.tokenizer, input_pieces, is_special),
        surfaces(loaded.tokenizer, original_pieces, is_special),
        [position in masked for position in range(len(original))],
        is_special,
        _values_where(scored, None if rtd_logits is None else rtd_logits.sigmoid()),
        (inputs.ne(original) if is_noise is None else is_noise).tolist(),
        _values_where(scored, None if token_log_probs is None else token_log_probs(inputs[None])[0]),
    )
    return [Token(*values) for values in zip(*columns, strict=True)]


def _values_where(scored: list[bool], values: Tensor | None) -> list[float | None]:
    """Return the values [T] as Python numbers, with None at unscored tokens or where there are no values."""
    if values is None:
        return [None] * len(scored)
    return [value if is_scored else None for value, is_scored in zip(values.tolist(), scored, strict=True)]


def _samples(
    loaded: LoadedCheckpoint, tokens: Tensor, outputs: list[Any], index: int, position: int
) -> list[DepthSample]:
    """Return the sample of each depth at one masked token of ``tokens`` [T], from the outputs of :func:`forward_of_depth`."""
    samples, before = [], loaded.dictionary[tokens[position - 1]]
    starts_line = int(tokens[position - 1]) in (loaded.dictionary.bos(), loaded.dictionary.eos())
    for output in outputs:
        sampled, logits = _field(output, "sampled_tokens"), _field(output, "rtd_logits")
        if sampled is None:
            return []
        probability = None if logits is None else logits[position].sigmoid().item()
        piece = loaded.dictionary[sampled[index]]
        text = surfaces(loaded.tokenizer, [before, piece], [starts_line, False])[1]
        samples.append(DepthSample(piece, f" {text}" if starts_line else text, probability))
    return samples


def _candidates(loaded: LoadedCheckpoint, output: Any, index: int) -> list[Prediction]:
    """Return the candidates of multi-word selection at one masked token, the original first, with their softmax."""
    candidates, logits = _field(output, "candidates"), _field(output, "mws_logits")
    if candidates is None or logits is None:
        return []
    pairs = zip(candidates[index].tolist(), logits[index].softmax(-1).tolist(), strict=True)
    return [Prediction(loaded.dictionary[token], probability) for token, probability in pairs]


def _discriminator_prediction(output: Any, index: int, position: int) -> dict[str, float]:
    """Return what a discriminator that predicts tokens predicts for one masked token; empty for one that detects."""
    predictions = getattr(output, "predictions", None)
    if predictions is None:
        return {}
    all_tokens = predictions.nll.size(1) == output.corrupted_tokens.size(1)
    entry = (0, position if all_tokens else index)
    fields = {"discriminator_probability": float((-predictions.nll[entry]).exp())}
    if predictions.copy_probs is not None:
        fields["copy_probability"] = float(predictions.copy_probs[entry])
    return fields


def _masked_token(
    loaded: LoadedCheckpoint, position: int, original: int, logits: Tensor, weights: Tensor, top: int, **fields: Any
) -> MaskedToken:
    """Return the ``top`` predictions of each depth from its logits [K,V], and its probability of the original token.

    Tokens that are never sampled (special tokens, padding of the vocabulary) are excluded from the predictions, but are
    part of the softmax, as in training. ``fields`` are further fields of :class:`MaskedToken`.
    """
    probabilities = logits.softmax(-1)
    never_sampled = loaded.model.never_sampled_mask
    best = probabilities.masked_fill(never_sampled, -1.0).topk(min(top, int((~never_sampled).sum())), dim=-1)
    return MaskedToken(
        position=position,
        mixture_weights=weights.tolist(),
        predictions=[
            [Prediction(loaded.dictionary[i], p) for i, p in zip(ids, values, strict=True)]
            for ids, values in zip(best.indices.tolist(), best.values.tolist(), strict=True)
        ],
        original_probabilities=probabilities[:, original].tolist(),
        **fields,
    )


def surfaces(tokenizer: Tokenizer, pieces: list[str], is_special: list[bool]) -> list[str]:
    """Return the part of the decoded text that each piece adds, so that the joined parts equal the text.

    A special token adds nothing, and decoding restarts after it. Where one more piece changes the text before it (several
    bytes of one character), its part is the piece itself.
    """
    parts, pieces_so_far, text = [], [], ""
    for piece, special in zip(pieces, is_special, strict=True):
        if special:
            parts.append("")
            pieces_so_far, text = [], ""
            continue
        pieces_so_far.append(piece)
        longer = tokenizer.decode(pieces_so_far)
        parts.append(printable(longer[len(text) :] if longer.startswith(text) else piece))
        text = longer
    return parts
