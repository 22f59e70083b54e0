"""An exported folder, loaded as a user loads it, against our own code: token ids, and what the model makes of them.

Tolerance: both sides compute in float32 with the same formulas in another order of summation. Measured, of the largest output:
5e-7 on trained models of 2 and 12 layers, 4e-6 on 24 layers of width 1,024 with large random weights. 3e-5 leaves room for
other processors; a wrong weight, position or sign is far beyond it.
"""

import random
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, Iterator, NamedTuple

import torch
from torch import Tensor

from amos_fairseq.errors import UserError
from amos_fairseq.interop.checkpoint import Pretrained
from amos_fairseq.interop.export_model import AUTO_CLASSES, comparable
from amos_fairseq.interop.export_parts import Part
from amos_fairseq.interop.hugging_face_rows import ABSENT
from amos_fairseq.interop.hugging_face_tables import MASKED_LM
from amos_fairseq.models.fine_tuning import FineTunedModel

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

TOLERANCE = 3e-5  # of the largest output
_SEED = 1
_BATCH = 8
# Odd on purpose: accents in two characters, ligatures, scripts, signs, things that are no text, nothing at all.
_ODD_TEXTS = [
    "",
    " ",
    "a",
    "The quick brown fox doesn't jump over 1,234.5 lazy dogs (yet).",
    "  two  spaces\tand a tab ",
    "Café, cafe\u0301; E\u0301cole; naïve façade — “quoted” … ½ ﬁne \uff21\uff22 İstanbul ŒUVRE straße Ǆ ẛ̣",
    "中国 and 日本 カ\u3099 한국어 \u1112\u1161\u11ab हिन्दी العربية עברית ไทย",
    "🎉 snow☃man \U0001f9d1\u200d\U0001f33e 🇩🇪 \U0001d553",
    "line\nbreak\r\nand \u2028 \x85 \xa0 \u3000 \x07 control \x00 \ufeff \u200b soft\xadhyphen \ufdd0",
    "<s> </s> <mask> <pad> <unk> x<mask>y [MASK] [CLS] ## @@ </w> ▁ \\x{3c}",
    "e\u0301\u0302 combining \u0301 alone a\u0344",
    "x" * 2000,
    "Donaudampfschifffahrtsgesellschaftskapitän " * 20,
]


class Agreement(NamedTuple):
    """What :func:`check_folder` found."""

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


def check_folder(folder: Path, pretrained: Pretrained, part: Part, ids: Tensor, trusts: bool) -> Agreement:
    """Compare both sides.

    Args:
        folder: the exported one.
        pretrained: the checkpoint that it was made of.
        part: what of it.
        ids: [dictionary size] id of each of our rows in the folder.
        trusts: the folder's own code may be run.

    Raises:
        UserError: a text gets other ids, or an output differs by more than ``TOLERANCE`` of the largest one.
    """
    tokenizer, model = load_as_users_do(folder, part, trusts)
    num_texts = check_token_ids(tokenizer, pretrained, ids)
    found = []
    for tokens in token_batches(pretrained, ids):
        ours, theirs = both_outputs(model, part, pretrained, tokens, ids)
        found.append(torch.stack([(ours - theirs).abs().max(), ours.abs().max()]))
    difference, largest = torch.stack(found).amax(0).tolist()  # nan if one of them is
    agreement = Agreement(num_texts, len(found), (2, pretrained.model.max_positions()), difference, largest)
    if not difference <= TOLERANCE * largest:  # also where a number is none
        raise UserError(
            f"the exported model differs from the checkpoint by {difference:.2e}, of outputs up to {largest:.3g}; float32 "
            f"rounding explains at most {TOLERANCE:g} of that, so nothing was written"
        )
    return agreement


def load_as_users_do(folder: Path, part: Part, trusts: bool) -> tuple["PreTrainedTokenizerBase", "PreTrainedModel"]:
    """Tokenizer and model, float32, in eval mode. What transformers keeps of a folder's own code is removed again."""
    import transformers
    from transformers.dynamic_module_utils import HF_MODULES_CACHE, TRANSFORMERS_DYNAMIC_MODULE_NAME

    kept = Path(HF_MODULES_CACHE) / TRANSFORMERS_DYNAMIC_MODULE_NAME
    before = set(kept.glob("*"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=trusts)
    auto_class = getattr(transformers, AUTO_CLASSES[part.kind])
    model = auto_class.from_pretrained(folder, trust_remote_code=trusts, dtype=torch.float32).eval()
    for copy in set(kept.glob("*")) - before:
        if folder.name.strip(".").partition(".")[0] in copy.name:  # the folder will not have this name for long
            shutil.rmtree(copy)
    return tokenizer, model


def check_token_ids(tokenizer: "PreTrainedTokenizerBase", pretrained: Pretrained, ids: Tensor) -> int:
    """The number of texts whose ids are equal on both sides, alone and as a pair; :class:`UserError` at the first other."""
    texts = list(texts_to_compare(pretrained))
    for text, second in zip(texts, ["", *texts], strict=False):
        expected = framed_ids(pretrained, ids, text)
        _compare_ids(tokenizer, text, expected, _found_ids(tokenizer, text))
        if second:  # transformers takes an empty second text for none
            expected += framed_ids(pretrained, ids, second)[1:]
            _compare_ids(tokenizer, text, expected, _found_ids(tokenizer, text, second))
    return len(texts)


def _found_ids(tokenizer: "PreTrainedTokenizerBase", *texts: str) -> list[int]:
    """A text that spells a special token is text here, as on our side; too long a text needs no warning."""
    return tokenizer(*texts, split_special_tokens=True, verbose=False)["input_ids"]


def _compare_ids(tokenizer: "PreTrainedTokenizerBase", text: str, expected: list[int], found: list[int]) -> None:
    if expected == found:
        return
    place = next((i for i, (a, b) in enumerate(zip(expected, found, strict=False)) if a != b), len(expected))
    here, there = (tokenizer.convert_ids_to_tokens(side[place : place + 6]) for side in (expected, found))
    raise UserError(
        f"the text {text[:60]!a} has other token ids in the exported tokenizer: from token {place} on {there} instead of "
        f"{here}; nothing was written"
    )


def framed_ids(pretrained: Pretrained, ids: Tensor, text: str) -> list[int]:
    """``<s> text </s>`` in the ids of the folder."""
    dictionary = pretrained.dictionary
    pieces = [dictionary.index(piece) for piece in pretrained.tokenizer.encode(text)]
    return ids[torch.tensor([dictionary.bos(), *pieces, dictionary.eos()])].tolist()


def texts_to_compare(pretrained: Pretrained, number: int = 300) -> Iterator[str]:
    """Odd texts, random characters of all of Unicode and of parts of it, and pieces of the vocabulary in random order."""
    yield from _ODD_TEXTS
    draw = random.Random(_SEED)
    planes = [*range(0xD800), *range(0xE000, 0x110000)]
    alphabets = (
        planes,
        range(0x20, 0x7F),
        range(0x20, 0x250),
        [*range(0x41, 0x7B), *range(0x300, 0x345)],
        range(0x3000),
    )
    pieces = pretrained.tokenizer.dictionary_symbols
    for _ in range(number):
        characters = [chr(code) for code in draw.choices(draw.choice(alphabets), k=draw.randint(1, 40))]
        yield "".join(characters)
        yield pretrained.tokenizer.decode(draw.choices(pieces, k=draw.randint(1, 40)))


def token_batches(pretrained: Pretrained, ids: Tensor) -> Iterator[Tensor]:
    """Right-padded batches [B,T] in our ids: random tokens, lengths from 2 to the longest, more short ones than long ones."""
    longest, dictionary = pretrained.model.max_positions(), pretrained.dictionary
    lengths = sorted({*range(2, min(longest, 9) + 1), *(longest * k // 12 for k in range(1, 13)), longest - 1} - {0, 1})
    framing = {dictionary.bos(), dictionary.pad(), dictionary.eos()}
    words = torch.tensor([row for row in range(len(dictionary)) if row not in framing and ids[row] != ABSENT])
    draw = torch.Generator().manual_seed(_SEED)
    for start in range(0, len(lengths), _BATCH):
        chosen = lengths[start : start + _BATCH]
        tokens = torch.full((len(chosen), max(chosen)), dictionary.pad())
        for row, length in enumerate(chosen):
            tokens[row, :length] = words[torch.randint(len(words), (length,), generator=draw)]
            tokens[row, 0], tokens[row, length - 1] = dictionary.bos(), dictionary.eos()
            if length > 5:
                tokens[row, length // 2] = dictionary.eos()  # a pair
        yield tokens


@torch.no_grad()
def both_outputs(model: Any, part: Part, pretrained: Pretrained, tokens: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Ours and the folder's outputs for tokens [B,T] in our ids, at real tokens only."""
    real = tokens.ne(pretrained.dictionary.pad())
    inputs = {"input_ids": ids[tokens], "attention_mask": real.long()}
    if isinstance(pretrained.model, FineTunedModel) and (types := pretrained.model.token_types(tokens)) is not None:
        inputs["token_type_ids"] = types
    ours, theirs = part.outputs(tokens), comparable(part, model(**inputs), ids)
    if part.kind == MASKED_LM:
        ours = ours[..., ids != ABSENT]
    if ours.ndim > 1 and ours.shape[:2] == real.shape:
        ours, theirs = ours[real], theirs[real]
    return ours.float(), theirs.float()
