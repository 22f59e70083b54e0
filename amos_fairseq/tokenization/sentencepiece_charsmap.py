"""SentencePiece's normalization as steps of the `tokenizers` library with exactly the same result.

A SentencePiece model contains a table of rules, "replace these characters by those", and applies the longest rule that
matches at each position. The library's ``Precompiled`` step reads the same table, but applies it to grapheme clusters, and
within a cluster it takes the *shortest* rule and drops the rest: "E" followed by a combining acute accent becomes "e" under
case folding, without the accent. Rules for several characters are therefore removed from its input: steps before it replace
their sources, and a separator before every character leaves it clusters of one character, on which it is exact.

The table has 220,000 rules for several characters. Only the ids matter, and all unknown characters share one id, so only
rules whose result differs from that of the single characters *in the vocabulary* become steps: about twenty for English.
"""

import functools
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

import numpy as np
from tokenizers import Regex, normalizers

from amos_fairseq.errors import UserError

_ANY = r"[\x{00}-\x{10ffff}]"
# Noncharacters, which Unicode reserves for internal use: they occur in no text and in no rule.
_NONCHARACTERS = [chr(code) for code in range(0xFDD0, 0xFDF0)]
# A unit of the table's double array (darts-clone) has a label, which must equal the byte just read, a flag that a rule ends
# here, and the offset of the next units; or, after the end of a rule, its value.
_LABEL = (1 << 31) | 0xFF
_ENDS_A_RULE = 1 << 8
_VALUE = (1 << 31) - 1


@functools.lru_cache(maxsize=2)
def read_rules(charsmap: bytes) -> dict[str, str]:
    """Return source -> target of every rule of a ``precompiled_charsmap``: a double array of the sources, then the targets."""
    size = int.from_bytes(charsmap[:4], "little")
    units = np.frombuffer(charsmap[4 : 4 + size], dtype="<u4").astype(np.int64)
    targets = charsmap[4 + size :]
    offsets = (units >> 10) << ((units & (1 << 9)) >> 6)
    rules: dict[str, str] = {}
    sources, bases = [b""], offsets[:1]
    while sources:  # one byte longer in each round
        parents, labels, nodes = _children(units, bases)
        sources = [sources[parent] + bytes((label,)) for parent, label in zip(parents, labels, strict=True)]
        bases = nodes ^ offsets[nodes]
        for i in np.nonzero(units[nodes] & _ENDS_A_RULE)[0]:
            start = int(units[bases[i]] & _VALUE)
            rules[sources[i].decode("utf-8")] = targets[start : targets.index(b"\0", start)].decode("utf-8")
    return rules


def _children(units: np.ndarray, bases: np.ndarray) -> tuple[list[int], list[int], np.ndarray]:
    """Return every way to read one more byte: the index into ``bases`` where it starts, the byte, the node reached."""
    different, which = np.unique(bases, return_inverse=True)  # many sources share their last bytes
    bytes_ = np.arange(1, 256)
    nodes = different[:, None] ^ bytes_
    found = (nodes < len(units)) & (units[np.minimum(nodes, len(units) - 1)] & _LABEL == bytes_)
    parents, columns = np.nonzero(found[which])
    return parents.tolist(), bytes_[columns].tolist(), nodes[which[parents], columns]


def exact_normalizer(charsmap: bytes, alphabet: set[str]) -> list[normalizers.Normalizer]:
    """Return steps that normalize a text as SentencePiece does, up to which unknown character replaces an unknown one.

    Args:
        charsmap: of the model's ``normalizer_spec``; empty if text is not normalized.
        alphabet: all characters that the model has a piece for, and the space.

    Raises:
        UserError: the table applies rules to the results of rules, as no Unicode normalizer does; the steps would be inexact.
    """
    if not charsmap:
        return []
    rules = read_rules(charsmap)
    singles = {source: target for source, target in rules.items() if len(source) == 1}
    _refuse_chains(rules, singles)
    separator, consumer, unknown = _unused_characters(alphabet | rules.keys() | set("".join(rules.values())))
    steps: list[normalizers.Normalizer] = [normalizers.Replace(Regex(f"[{separator}{consumer}]"), unknown)]
    for length, targets in _by_length(_needed_rules(rules, singles, alphabet, unknown)):
        steps += _steps_of_length(length, targets, separator, consumer)
    removed = "".join(_escaped(source) for source, target in sorted(singles.items()) if not target)
    if removed:
        steps.append(normalizers.Replace(Regex(rf"\A[{removed}]+"), " "))  # nothing, or SentencePiece's first space
        steps.append(normalizers.Replace(Regex(f"[{removed}]"), separator))
    steps += [
        # Of ASCII characters, only a line feed after a carriage return continues a cluster. Precompiled fails on a text that
        # begins with a character without an origin in the text, so there is no separator before the first character.
        normalizers.Replace(Regex(rf"(?<={_ANY})(?=[^\x{{00}}-\x{{7f}}]|\n)"), separator),
        normalizers.Precompiled(charsmap),
        normalizers.Replace(separator, ""),
    ]
    return steps


def _steps_of_length(
    length: int, targets: Mapping[str, list[str]], separator: str, consumer: str
) -> Iterator[normalizers.Normalizer]:
    """Replace the first character of a source by the target and a sign to drop the others, then drop them.

    In a single step the library would put the target at the offset of the source's last character, and Metaspace recognizes
    the beginning of a text by its offset.
    """
    for target, sources in sorted(targets.items()):
        yield normalizers.Replace(Regex(_alternatives(sources)), target + consumer)
    # The separator prevents another rule from matching the target and what follows it.
    yield normalizers.Replace(Regex(f"{consumer}{_ANY}{{{length - 1}}}"), separator)


def _refuse_chains(rules: Mapping[str, str], singles: Mapping[str, str]) -> None:
    """Targets pass through the rules for single characters once more, which must not change them."""
    changed = next((source for source, target in rules.items() if any(c in singles for c in target)), None)
    if changed is not None:
        raise UserError(
            f"the SentencePiece model normalizes {changed!a} to {rules[changed]!a}, which it would normalize again: "
            "such rules cannot be written exactly as a tokenizer.json"
        )


def _unused_characters(taken: set[str]) -> tuple[str, str, str]:
    first, second, third, *_ = (character for character in _NONCHARACTERS if character not in taken)
    return first, second, third


class _InVocabulary(dict[int, str]):
    """A table for ``str.translate``: single-character rules applied, characters outside the alphabet made ``unknown``."""

    def __init__(self, singles: Mapping[str, str], alphabet: set[str], unknown: str) -> None:
        super().__init__((ord(character), character) for character in alphabet)
        self.unknown = unknown
        for source, target in singles.items():
            self[ord(source)] = "".join(c if c in alphabet else unknown for c in target)

    def __missing__(self, code: int) -> str:
        return self.setdefault(code, self.unknown)


def _needed_rules(
    rules: Mapping[str, str], singles: Mapping[str, str], alphabet: set[str], unknown: str
) -> dict[str, str]:
    """Return the rules for several characters that change ids: source -> target with its unknown characters replaced."""
    by_single_rules, targets = _InVocabulary(singles, alphabet, unknown), _InVocabulary({}, alphabet, unknown)
    runs = re.compile(f"{unknown}+")  # one id each
    needed: dict[str, str] = {}
    for source in sorted((source for source in rules if len(source) > 1), key=len):
        target = runs.sub(unknown, rules[source].translate(targets))
        if target != runs.sub(unknown, source.translate(by_single_rules)) or _contains_source(source, needed):
            needed[source] = target
    return needed


def _contains_source(source: str, rules: Mapping[str, str]) -> bool:
    """Return whether a shorter rule would apply inside ``source``."""
    length = len(source)
    return any(source[i:j] in rules for i in range(length) for j in range(i + 2, length + 1) if j - i < length)


def _by_length(rules: Mapping[str, str]) -> Iterator[tuple[int, dict[str, list[str]]]]:
    """Yield source length, and target -> sources of that length; the longest first, because the longest match applies."""
    lengths: dict[int, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for source, target in rules.items():
        lengths[len(source)][target].append(source)
    yield from sorted(lengths.items(), reverse=True)


def _alternatives(sources: Iterable[str]) -> str:
    """Return a pattern for the first character of ``sources`` where the rest follows; equal rests share a character class."""
    continuations: dict[str, list[str]] = defaultdict(list)
    for source in sources:
        continuations[source[0]].append(source[1:])
    first: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for character, rest in continuations.items():
        first[tuple(sorted(rest))].append(character)
    return "|".join(
        f"[{''.join(map(_escaped, characters))}](?={'|'.join(''.join(map(_escaped, text)) for text in rest)})"
        for rest, characters in sorted(first.items())
    )


def _escaped(character: str) -> str:
    return f"\\x{{{ord(character):x}}}"
