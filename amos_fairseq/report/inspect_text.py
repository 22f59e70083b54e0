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
from amos_fairseq.report.inspection import DepthSample, Inspection, MaskedToken, Prediction, Token
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
    masked = [
        _masked_token(loaded, tokens, position, logits[:, 0, index], weights[0, index], top)
        | _discriminator_predictions(loaded, output, index, position)
        for index, position in enumerate(batch["net_input"]["masked_positions"][0].tolist())
    ]
    if with_samples:
        by_depth = [forward_of_depth(model, batch["net_input"], n, seed) for n in range(len(model.depth_names))]
        for index, fields in enumerate(masked):
            fields["samples"] = _samples(loaded, tokens, by_depth, index, fields["position"])
    noise_class = "replaced" if _field(output, "is_noise") is None else "noise"
    return Inspection(
        file=str(loaded.file),
        num_updates=loaded.num_updates,
        seed=seed,
        mask_prob=mask_prob,
        depth_names=model.depth_names,
        tokens=_tokens(loaded, tokens, {fields["position"] for fields in masked}, output),
        masked=[MaskedToken(**fields) for fields in masked],
        num_truncated=len(all_tokens) - len(tokens),
        positive_class="" if _field(output, "rtd_logits") is None else noise_class,
        is_corrupted=_field(output, "corrupted_tokens") is not None,
        is_masked=not isinstance(model, ElectricModel),  # a model that scores all tokens at once needs their neighbors
    )


def text_of_corpus(loaded: LoadedCheckpoint, flags: str = "--text or --file") -> str:
    """Return the first paragraph of 30 to 100 known tokens of the run's validation text; ``flags`` give another text."""
    data = str(loaded.task.get("data") or "").split(os.pathsep)[0]
    path = os.path.join(data, "valid")
    lines = data_utils.load_indexed_dataset(path, loaded.dictionary) if os.path.isfile(f"{path}.idx") else ()
    for index in range(len(lines)):
        ids = lines[index].tolist()[:-1]  # without </s>
        if 30 <= len(ids) <= min(100, loaded.model.max_positions() - 2) and loaded.dictionary.unk() not in ids:
            return loaded.tokenizer.decode([loaded.dictionary[i] for i in ids]).strip()
    raise UserError(f"{path} has no paragraph to show: give a text with {flags}")


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


def _field(output: Any, name: str) -> Tensor | None:
    """Return a field of the model output for the only sequence of the batch, None where the objective has none."""
    value = getattr(output, name, None)
    return None if value is None else value[0]


def _tokens(loaded: LoadedCheckpoint, original: Tensor, masked: set[int], output: Any) -> list[Token]:
    """Return every token [T] of the main network's input, with what the model predicts for it."""
    dictionary, model = loaded.dictionary, loaded.model
    names = ("corrupted_tokens", "rtd_logits", "is_noise", "is_scored")
    corrupted, rtd_logits, is_noise, is_scored = (_field(output, name) for name in names)
    inputs = original if corrupted is None else corrupted
    is_positive = inputs.ne(original) if is_noise is None else is_noise
    log_probs = model.token_log_probs(inputs[None])[0] if isinstance(model, ElectricModel) else None
    pieces, input_pieces = ([dictionary[i] for i in ids.tolist()] for ids in (original, inputs))
    special = [i in (dictionary.bos(), dictionary.eos(), dictionary.pad()) for i in original.tolist()]
    texts, input_texts = (surfaces(loaded.tokenizer, each, special) for each in (pieces, input_pieces))
    tokens = []
    for i in range(len(original)):
        scored = is_scored is None or bool(is_scored[i])
        tokens.append(
            Token(
                original=pieces[i],
                input=input_pieces[i],
                original_text=texts[i],
                input_text=input_texts[i],
                masked=i in masked,
                special=special[i],
                is_positive=bool(is_positive[i]),
                positive_probability=rtd_logits[i].sigmoid().item() if scored and rtd_logits is not None else None,
                log_prob=log_probs[i].item() if scored and log_probs is not None else None,
            )
        )
    return tokens


def _masked_token(
    loaded: LoadedCheckpoint, tokens: Tensor, position: int, logits: Tensor, weights: Tensor, top: int
) -> dict[str, Any]:
    """Return fields of :class:`MaskedToken`: the ``top`` predictions of each depth from its logits [K,V].

    Tokens that are never sampled (special tokens, padding of the vocabulary) are not predicted, but are part of the softmax,
    as in training.
    """
    probabilities = logits.softmax(-1)
    never_sampled = loaded.model.never_sampled_mask
    best = probabilities.masked_fill(never_sampled, -1.0).topk(min(top, int((~never_sampled).sum())), dim=-1)
    return {
        "position": position,
        "mixture_weights": weights.tolist(),
        "predictions": [
            [Prediction(loaded.dictionary[i], p) for i, p in zip(ids, values, strict=True)]
            for ids, values in zip(best.indices.tolist(), best.values.tolist(), strict=True)
        ],
        "original_probabilities": probabilities[:, int(tokens[position])].tolist(),
    }


def _discriminator_predictions(loaded: LoadedCheckpoint, output: Any, index: int, position: int) -> dict[str, Any]:
    """Return the fields of :class:`MaskedToken` that only some discriminators have: the candidates of multi-word selection,
    the original first, with their softmax; the probability of the original of one that predicts tokens."""
    fields: dict[str, Any] = {}
    candidates, logits = _field(output, "candidates"), _field(output, "mws_logits")
    if candidates is not None and logits is not None:
        pairs = zip(candidates[index].tolist(), logits[index].softmax(-1).tolist(), strict=True)
        fields["candidates"] = [Prediction(loaded.dictionary[token], probability) for token, probability in pairs]
    if (predictions := getattr(output, "predictions", None)) is not None:
        all_tokens = predictions.nll.size(1) == output.corrupted_tokens.size(1)
        entry = (0, position if all_tokens else index)
        fields["discriminator_probability"] = float((-predictions.nll[entry]).exp())
        if predictions.copy_probs is not None:
            fields["copy_probability"] = float(predictions.copy_probs[entry])
    return fields


def _samples(
    loaded: LoadedCheckpoint, tokens: Tensor, outputs: list[Any], index: int, position: int
) -> list[DepthSample]:
    """Return the sample of each depth at one masked token of ``tokens`` [T], from the outputs of :func:`forward_of_depth`."""
    dictionary, samples = loaded.dictionary, []
    starts_line = int(tokens[position - 1]) in (dictionary.bos(), dictionary.eos())
    for output in outputs:
        sampled, logits = _field(output, "sampled_tokens"), _field(output, "rtd_logits")
        if sampled is None:
            return []
        piece = dictionary[sampled[index]]
        text = surfaces(loaded.tokenizer, [dictionary[tokens[position - 1]], piece], [starts_line, False])[1]
        word = text.strip() or piece
        shown = word if starts_line or text.startswith(" ") else f"-{word}"
        samples.append(DepthSample(piece, shown, None if logits is None else logits[position].sigmoid().item()))
    return samples


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
