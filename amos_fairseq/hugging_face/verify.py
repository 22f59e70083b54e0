"""Compare an exported folder, loaded as a user loads it, with our own code: token ids and model outputs.

Tolerance: both sides compute in float32 with the same formulas in another order of summation. Measured, relative to the largest
output: 5e-7 on trained models of 2 and 12 layers, 4e-6 on 24 layers of width 1,024 with large random weights. 3e-5 leaves room
for other processors; a wrong weight, position or sign exceeds it by far.
"""

import importlib
import json
import random
import shutil
import sys
import tempfile
import types
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from fairseq.data import ListDataset
from torch import Tensor

from amos_fairseq.checkpoints.read import LoadedCheckpoint
from amos_fairseq.downstream.classification.dataset import ShortenedTexts, join_texts
from amos_fairseq.errors import UserError
from amos_fairseq.hugging_face import custom_code
from amos_fairseq.hugging_face.config import CONFIG_FILE
from amos_fairseq.hugging_face.parts import Part
from amos_fairseq.hugging_face.tokenizer import TOKENIZER_CONFIG_FILE
from amos_fairseq.hugging_face.weights import Head
from amos_fairseq.text.tokenization.fast_tokenizer import ABSENT

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

TOLERANCE = 3e-5  # relative to the largest output
# Number of tokens of texts, without special ones, to which they are also compared truncated: many pairs are longer, of some
# both texts are cut. It is even: at an odd one tokenizers 0.23.2 forgets which text was longer.
TRUNCATED = 8
_SEED = 1
_BATCH_SIZE = 8
_NUM_RANDOM_TEXTS = 300  # random characters, and as many of random pieces
# Unusual texts: accents as two characters, ligatures, scripts, emoji, control characters, spelled special tokens, no text.
_UNUSUAL_TEXTS = [
    "",
    " ",
    "a",
    "The quick brown fox doesn't jump over 1,234.5 lazy dogs (yet).",
    "  two  spaces\tand a tab ",
    "Café, cafe\u0301; E\u0301cole; naïve façade — “quoted” … ½ ﬁne \uff21\uff22 İstanbul ŒUVRE straße Ǆ ẛ̣",
    "中国 and 日本 カ\u3099 한국어 \u1112\u1161\u11ab हिन्दी العربية עברית ไทย",
    "🎉 snow☃man \U0001f9d1\u200d\U0001f33e 🇩🇪 \U0001d553",
    "line\nbreak\r\nand \u2028 \x85 \xa0 \u3000 \x07 control \x00 \ufeff \u200b soft\xadhyphen \ufdd0",
    "<s> </s> <mask> <pad> <unk> x<mask>y [MASK] [CLS] ##  </w> ▁ \\x{3c}",
    "e\u0301\u0302 combining \u0301 alone a\u0344",
    "x" * 2000,
    "Donaudampfschifffahrtsgesellschaftskapitän " * 20,
]


class Agreement(NamedTuple):
    """The result of :func:`verify_folder`."""

    num_texts: int
    num_batches: int
    lengths: tuple[int, int]
    difference: float  # the largest, absolute
    largest: float  # the largest output, absolute

    def __str__(self) -> str:
        shortest, longest = self.lengths
        return (
            f"token ids equal on {self.num_texts:,} texts; {self.num_batches} batches of {shortest} to {longest} tokens: "
            f"largest difference {self.difference:.1e}, of outputs up to {self.largest:.3g}"
        )


def verify_folder(folder: Path, loaded: LoadedCheckpoint, part: Part, ids: Tensor) -> Agreement:
    """Compare the folder, whose code is run, with the checkpoint; ``ids``: see :class:`.tokenizer.FolderTokenizer`."""
    tokenizer, model = load_folder(folder, part)
    num_texts = compare_token_ids(tokenizer, loaded, ids)
    maxima = []
    for tokens in token_batches(loaded, ids):
        ours, theirs = outputs_of_both(model, part, loaded, tokens, ids)
        maxima.append(torch.stack([(ours - theirs).abs().max(), ours.abs().max()]))
    difference, largest = torch.stack(maxima).amax(0).tolist()  # nan if one of them is nan
    agreement = Agreement(num_texts, len(maxima), (2, loaded.model.max_positions()), difference, largest)
    if not difference <= TOLERANCE * largest:  # true for nan
        raise UserError(
            f"the exported model differs from the checkpoint by {difference:.2e}, of outputs up to {largest:.3g}; float32 "
            f"rounding explains at most {TOLERANCE:g} of that, so nothing was written"
        )
    return agreement


def load_folder(folder: Path, part: Part) -> tuple["PreTrainedTokenizerBase", "PreTrainedModel"]:
    """Load tokenizer and model, float32, in eval mode."""
    import transformers

    tokenizer_class, model_class = transformers.AutoTokenizer, getattr(transformers, part.head.auto_class)
    if custom_code.is_in(folder):
        tokenizer_class = _class_in(folder, TOKENIZER_CONFIG_FILE, "AutoTokenizer") or tokenizer_class
        model_class = _class_in(folder, CONFIG_FILE, part.head.auto_class) or model_class
    tokenizer = tokenizer_class.from_pretrained(folder)
    return tokenizer, model_class.from_pretrained(folder, dtype=torch.float32).eval()


def _class_in(folder: Path, config_file: str, auto_class: str) -> Any:
    """Return the class in the folder's code that its configuration names for ``auto_class``, if it names one.

    It is what transformers does with ``trust_remote_code=True``, without the copies in its cache, which remain there.
    """
    auto_map = json.loads((folder / config_file).read_text(encoding="utf-8")).get("auto_map", {})
    if auto_class not in auto_map:
        return None
    reference = auto_map[auto_class]
    module, _, name = (reference if isinstance(reference, str) else reference[0]).partition(".")
    package = types.ModuleType("exported_folder")
    with tempfile.TemporaryDirectory() as copies:  # Python writes its bytecode beside the code
        for file in folder.glob("*.py"):
            shutil.copy(file, copies)
        package.__path__ = [copies]
        sys.modules[package.__name__] = package
        try:
            return getattr(importlib.import_module(f"{package.__name__}.{module}"), name)
        finally:
            for loaded in [each for each in sys.modules if each.partition(".")[0] == package.__name__]:
                del sys.modules[loaded]


def compare_token_ids(tokenizer: "PreTrainedTokenizerBase", loaded: LoadedCheckpoint, ids: Tensor) -> int:
    """Compare the ids of texts, alone and in pairs, whole and truncated; return the number of texts."""
    texts = list(texts_to_compare(loaded))
    dictionary = loaded.dictionary
    lines = [torch.tensor([*map(dictionary.index, loaded.tokenizer.encode(t)), dictionary.eos()]) for t in texts]
    second, second_line = "", lines[0]
    for text, line in zip(texts, lines, strict=True):
        inputs = [((text,), [line])]
        if second:  # transformers ignores an empty second text
            inputs.append(((text, second), [line, second_line]))
        for compared, rows in inputs:
            row = join_texts([ListDataset([row], [len(row)]) for row in rows], dictionary.bos(), loaded.separator)
            num_special = 2 if len(rows) == 1 else 2 + loaded.num_separators
            limit = min(loaded.model.max_positions(), TRUNCATED + num_special)
            truncation = {"truncation": True, "max_length": limit}
            for ours, how in ((row[0], {}), (ShortenedTexts(row, limit)[0], truncation)):
                # Spelled special tokens are text, as on our side.
                theirs = tokenizer(*compared, split_special_tokens=True, verbose=False, **how)["input_ids"]
                _compare_ids(tokenizer, text, ids[ours].tolist(), theirs)
        second, second_line = text, line
    return len(texts)


def _compare_ids(tokenizer: "PreTrainedTokenizerBase", text: str, ours: list[int], theirs: list[int]) -> None:
    if ours == theirs:
        return
    first = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), len(ours))
    here, there = (tokenizer.convert_ids_to_tokens(side[first : first + 6]) for side in (ours, theirs))
    raise UserError(
        f"the text {text[:60]!a} has other token ids in the exported tokenizer: from token {first} on {there} instead of "
        f"{here}; nothing was written"
    )


def texts_to_compare(loaded: LoadedCheckpoint) -> Iterator[str]:
    """Yield unusual texts, random characters of all of Unicode and of parts of it, and random pieces of the vocabulary."""
    yield from _UNUSUAL_TEXTS
    rng = random.Random(_SEED)
    planes = [*range(0xD800), *range(0xE000, 0x110000)]
    letters_and_accents = [*range(0x41, 0x7B), *range(0x300, 0x345)]
    alphabets = (planes, range(0x20, 0x7F), range(0x20, 0x250), letters_and_accents, range(0x3000))
    pieces = loaded.tokenizer.dictionary_symbols
    for _ in range(_NUM_RANDOM_TEXTS):
        characters = [chr(code) for code in rng.choices(rng.choice(alphabets), k=rng.randint(1, 40))]
        yield "".join(characters)
        yield loaded.tokenizer.decode(rng.choices(pieces, k=rng.randint(1, 40)))


def token_batches(loaded: LoadedCheckpoint, ids: Tensor) -> Iterator[Tensor]:
    """Yield right-padded batches [B,T] of random tokens in our ids, of 2 to the maximum number of tokens, mostly short."""
    longest, dictionary = loaded.model.max_positions(), loaded.dictionary
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
