"""Compare an exported folder, loaded as a user loads it, with our own code: token ids and model outputs.

Tolerance: both sides compute in float32 with the same formulas in another order of summation. Measured, relative to the largest
output: 5e-7 on trained models of 2 and 12 layers, 4e-6 on 24 layers of width 1,024 with large random weights. 3e-5 leaves room
for other processors; a wrong weight, position or sign exceeds it by far.
"""

import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from amos_fairseq.checkpoints.read import LoadedCheckpoint
from amos_fairseq.errors import UserError
from amos_fairseq.hugging_face import custom_code
from amos_fairseq.hugging_face.parts import Part
from amos_fairseq.hugging_face.weights import Head
from amos_fairseq.text.tokenization.exported import spelled_token_found, texts_to_compare
from amos_fairseq.text.tokenization.fast_tokenizer import ABSENT

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Inputs of ModernBERT may have 8,192 tokens, of which two batches take minutes and gigabytes. Longer ones than this have no
# weights, windows or buckets of their own but for learned positions, which are copied whole.
LONGEST_COMPARED = 512
TOLERANCE = 3e-5  # relative to the largest output
# Inputs are also compared truncated to this number of tokens, special ones not counted. Many pairs are longer; of some, both
# texts are cut. The number is even, because with an odd one tokenizers 0.23.2 keeps one token too many of the second text.
TRUNCATED = 8
_SEED = 1
_BATCH_SIZE = 8


def verify_folder(folder: Path, loaded: LoadedCheckpoint, part: Part, ids: Tensor) -> str:
    """Compare the folder with the checkpoint, and return how well it agrees; ``ids``: see ``TokenIds`` of export.py."""
    tokenizer, model = load_folder(folder, part)
    agreement = compare_token_ids(tokenizer, loaded, ids)
    maxima = []
    for tokens in token_batches(loaded, ids):
        ours, theirs = outputs_of_both(model, part, loaded, tokens, ids)
        maxima.append(torch.stack([(ours - theirs).abs().max(), ours.abs().max()]))
    difference, largest = torch.stack(maxima).amax(0).tolist()  # nan if one of them is nan
    if not difference <= TOLERANCE * largest:  # true for nan
        raise UserError(
            f"the exported model differs from the checkpoint by {difference:.2e}, of outputs up to {largest:.3g}, more than by "
            "float32 rounding: nothing was written"
        )
    with torch.no_grad():
        model(**tokenizer("a", "b", return_tensors="pt"))  # a pair has token types of its own
    batches = f"{len(maxima)} batches of 2 to {longest_compared(loaded)} tokens"
    return f"{agreement}; {batches}: largest difference {difference:.1e}, of outputs up to {largest:.3g}"


def load_folder(folder: Path, part: Part) -> tuple["PreTrainedTokenizerBase", nn.Module]:
    """Load tokenizer and model, float32, in eval mode; with the classes of which the folder has copies, if it has any."""
    import transformers

    tokenizer_class, model_class = transformers.AutoTokenizer, getattr(transformers, part.head.auto_class)
    if part.code:  # with it, AutoTokenizer would ask on the terminal whether the folder's may run
        tokenizer_class, model_class = transformers.PreTrainedTokenizerFast, part.model_class
    if custom_code.is_in(folder, custom_code.TOKENIZER_CODE):
        from amos_fairseq.hugging_face.custom_code.tokenization_amos import AmosTokenizer

        tokenizer_class = AmosTokenizer
    return tokenizer_class.from_pretrained(folder), model_class.from_pretrained(folder, dtype=torch.float32).eval()


def compare_token_ids(tokenizer: "PreTrainedTokenizerBase", loaded: LoadedCheckpoint, ids: Tensor) -> str:
    """Compare the ids of texts, alone and in pairs, whole and truncated; return how well they agree."""
    tokenizer_here = loaded.tokenizer
    spelled = spelled_token_found(tokenizer_here)
    known = set(ids.tolist())  # any other has the embedding of <unk>
    texts = [(text, tokenizer_here.ids_of(tokenizer_here.encode(text))) for text in texts_to_compare(tokenizer_here)]
    inputs = [(text,) for text in texts]
    # transformers ignores an empty second text.
    inputs += [(text, before) for before, text in itertools.pairwise(texts) if before[0]]
    for words, pieces in (zip(*texts_of_input, strict=True) for texts_of_input in inputs):
        limit = min(loaded.model.max_positions(), TRUNCATED + loaded.num_special(len(words)))
        for length, truncation in ((sys.maxsize, {}), (limit, {"truncation": True, "max_length": limit})):
            ours = ids[torch.tensor(loaded.framed(pieces, length))].tolist()
            # Spelled special tokens are text, as on our side, but for protected ones.
            split = not any(map(tokenizer_here.spells_protected, words))
            theirs = tokenizer(*words, split_special_tokens=split, verbose=False, **truncation)["input_ids"]
            theirs = [token if token in known else tokenizer.unk_token_id for token in theirs]
            if ours != theirs:
                first = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), 0)
                here, there = (tokenizer.convert_ids_to_tokens(side[first : first + 6]) for side in (ours, theirs))
                raise UserError(
                    f"the text {words[0][:60]!a} has other token ids in the exported tokenizer: from token {first} on {there} "
                    f"instead of {here}; nothing was written"
                )
    note = "" if spelled is None else f" (a text that spells {spelled} is not text there, but this token)"
    return f"token ids equal on {len(texts):,} texts{note}"


def longest_compared(loaded: LoadedCheckpoint) -> int:
    return min(loaded.model.max_positions(), LONGEST_COMPARED)


def token_batches(loaded: LoadedCheckpoint, ids: Tensor) -> Iterator[Tensor]:
    """Yield right-padded batches [B,T] of random tokens in our ids, of 2 to :func:`longest_compared` tokens, mostly short."""
    longest, dictionary = longest_compared(loaded), loaded.dictionary
    lengths = sorted({*range(2, min(longest, 9) + 1), *(longest * k // 12 for k in range(1, 13)), longest - 1} - {0, 1})
    framing = {dictionary.bos(), dictionary.pad(), dictionary.eos()}
    inner = torch.tensor([row for row in range(len(dictionary)) if row not in framing and ids[row] != ABSENT])
    generator = torch.Generator().manual_seed(_SEED)
    for start in range(0, len(lengths), _BATCH_SIZE):
        chosen = lengths[start : start + _BATCH_SIZE]
        tokens = torch.full((len(chosen), max(chosen)), dictionary.pad())
        for row, length in enumerate(chosen):
            tokens[row, :length] = inner[torch.randint(len(inner), (length,), generator=generator)]
            tokens[row, 0], tokens[row, length - 1] = dictionary.bos(), dictionary.eos()
            if length > 6:  # a pair
                tokens[row, length // 2 : length // 2 + loaded.num_separators] = dictionary.eos()
        yield tokens


@torch.no_grad()
def outputs_of_both(
    model: Any, part: Part, loaded: LoadedCheckpoint, tokens: Tensor, ids: Tensor
) -> tuple[Tensor, Tensor]:
    """Return our and the folder's outputs for tokens [B,T] in our ids, at real tokens only."""
    real = tokens.ne(loaded.dictionary.pad())
    inputs = {"input_ids": ids[tokens], "attention_mask": real.long()}
    if (types := part.token_types(tokens)) is not None:
        inputs["token_type_ids"] = types
    ours, output = part.outputs(tokens), model(**inputs)
    if part.head == Head.NONE:
        theirs = output.last_hidden_state
    elif part.head == Head.QUESTION_ANSWERING:
        theirs = torch.stack([output.start_logits, output.end_logits], dim=-1)
    elif part.head == Head.DETECTION:
        theirs = output.logits[..., 1] - output.logits[..., 0]
    elif part.head == Head.MASKED_LM:
        known = ids != ABSENT
        ours, theirs = ours[..., : len(ids)][..., known], output.logits[..., ids[known]]
    else:
        theirs = output.logits
    if ours.ndim > 1 and ours.shape[:2] == real.shape:
        ours, theirs = ours[real], theirs[real]
    return ours.float(), theirs.float()
