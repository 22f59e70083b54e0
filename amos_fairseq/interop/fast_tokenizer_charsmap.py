"""SentencePiece's normalisation as steps of the `tokenizers` library that give the same text, character by character.

A SentencePiece model carries a table of rules, "these characters become those", and applies at each place the longest that
fits. The library's ``Precompiled`` step reads the same table, but applies it to grapheme clusters, and of a cluster it takes
the *shortest* rule and drops the rest ("E" and a combining acute accent become "e" under case folding, without the accent).
So rules for several characters are taken out of its hands: steps before it replace their sources, and a barrier before
every character leaves it clusters of one character each, on which it is exact.

The table has 220,000 rules for several characters. What matters is the ids, and all unknown characters share one, so only
rules whose result the vocabulary can tell from that of the single characters become steps: about twenty for English.
"""

import functools
import re
from collections import defaultdict
from typing import Dict, Iterable, Iterator, List, Mapping, Set, Tuple

import numpy as np
from tokenizers import Regex, normalizers

from amos_fairseq.errors import UserError

_ANY = r"[\x{00}-\x{10ffff}]"
# Unicode has set these apart for a program's own use: no text holds them, and no rule.
_NONCHARACTERS = [chr(code) for code in range(0xFDD0, 0xFDF0)]
# A unit of the table's double array (darts-clone): a label that must equal the byte just read, whether a rule ends here, and
# how far on the next units lie; or, where a rule has ended, its value.
_LABEL = (1 << 31) | 0xFF
_ENDS_A_RULE = 1 << 8
_VALUE = (1 << 31) - 1


@functools.lru_cache(maxsize=2)
def read_rules(charsmap: bytes) -> Dict[str, str]:
    """Source to target of every rule of a ``precompiled_charsmap``: a double array of the sources, then the targets."""
    size = int.from_bytes(charsmap[:4], "little")
    units = np.frombuffer(charsmap[4 : 4 + size], dtype="<u4").astype(np.int64)
    targets = charsmap[4 + size :]
    steps = (units >> 10) << ((units & (1 << 9)) >> 6)
    rules: Dict[str, str] = {}
    sources, bases = [b""], steps[:1]
    while sources:  # one byte longer in each round
        parents, labels, places = _children(units, bases)
        sources = [sources[parent] + bytes((label,)) for parent, label in zip(parents, labels, strict=True)]
        bases = places ^ steps[places]
        for row in np.nonzero(units[places] & _ENDS_A_RULE)[0]:
            start = int(units[bases[row]] & _VALUE)
            rules[sources[row].decode("utf-8")] = targets[start : targets.index(b"\0", start)].decode("utf-8")
    return rules


def _children(units: np.ndarray, bases: np.ndarray) -> Tuple[List[int], List[int], np.ndarray]:
    """Every way to read one more byte: index into ``bases`` where it starts, the byte, the place that is reached."""
    different, which = np.unique(bases, return_inverse=True)  # many sources end alike and share their ends
    bytes_ = np.arange(1, 256)
    places = different[:, None] ^ bytes_
    found = (places < len(units)) & (units[np.minimum(places, len(units) - 1)] & _LABEL == bytes_)
    parents, columns = np.nonzero(found[which])
    return parents.tolist(), bytes_[columns].tolist(), places[which[parents], columns]


def exact_normalizer(charsmap: bytes, alphabet: Set[str]) -> List[normalizers.Normalizer]:
    """Steps that treat a text as SentencePiece does, but for which unknown character an unknown character becomes.

    Args:
        charsmap: of the model's ``normalizer_spec``; empty where text is left as it is.
        alphabet: all characters that the model has a piece for, and the space.

    Raises:
        UserError: the table has rules that no normaliser of Unicode's has, so that its steps would not be exact.
    """
    if not charsmap:
        return []
    rules = read_rules(charsmap)
    singles = {source: target for source, target in rules.items() if len(source) == 1}
    _refuse_chains(rules, singles)
    barrier, consumer, unknown = _unused(alphabet | rules.keys() | set("".join(rules.values())))
    steps: List[normalizers.Normalizer] = [normalizers.Replace(Regex(f"[{barrier}{consumer}]"), unknown)]
    for length, targets in _by_length(_needed_rules(rules, singles, alphabet, unknown)):
        steps += _steps_of_length(length, targets, barrier, consumer)
    removed = "".join(_escaped(source) for source, target in sorted(singles.items()) if not target)
    if removed:
        steps.append(normalizers.Replace(Regex(rf"\A[{removed}]+"), " "))  # nothing, or SentencePiece's first space
        steps.append(normalizers.Replace(Regex(f"[{removed}]"), barrier))
    steps += [
        # Only a carriage return has a cluster with ASCII after it. Precompiled fails on a text that begins with something
        # that stands for no character of the original, hence not before the first character.
        normalizers.Replace(Regex(rf"(?<={_ANY})(?=[^\x{{00}}-\x{{7f}}]|\n)"), barrier),
        normalizers.Precompiled(charsmap),
        normalizers.Replace(barrier, ""),
    ]
    return steps


def _steps_of_length(
    length: int, targets: Mapping[str, List[str]], barrier: str, consumer: str
) -> Iterator[normalizers.Normalizer]:
    """The first character of a source becomes the target and a sign to drop the others.

    In one step the library would place the target where the last character of the source was, and Metaspace knows the
    beginning of a text by its place.
    """
    for target, sources in sorted(targets.items()):
        yield normalizers.Replace(Regex(_alternatives(sources)), target + consumer)
    # The barrier keeps what follows from making another rule of the target.
    yield normalizers.Replace(Regex(f"{consumer}{_ANY}{{{length - 1}}}"), barrier)


def _refuse_chains(rules: Mapping[str, str], singles: Mapping[str, str]) -> None:
    """Targets pass through the rules for single characters once more, which must leave them alone."""
    changed = next((source for source, target in rules.items() if any(c in singles for c in target)), None)
    if changed is not None:
        raise UserError(
            f"the SentencePiece model normalises {changed!a} to {rules[changed]!a}, which it would normalise again: "
            "such rules have no exact counterpart in a tokenizer.json"
        )


def _unused(taken: Set[str]) -> Tuple[str, str, str]:
    """Three characters that mean nothing to the model."""
    first, second, third, *_ = (character for character in _NONCHARACTERS if character not in taken)
    return first, second, third


class _Seen(Dict[int, str]):
    """For ``str.translate``: what a text becomes by single rules, as the vocabulary sees it."""

    def __init__(self, singles: Mapping[str, str], alphabet: Set[str], unknown: str) -> None:
        super().__init__((ord(character), character) for character in alphabet)
        self.unknown = unknown
        for source, target in singles.items():
            self[ord(source)] = "".join(c if c in alphabet else unknown for c in target)

    def __missing__(self, code: int) -> str:
        return self.setdefault(code, self.unknown)


def _needed_rules(
    rules: Mapping[str, str], singles: Mapping[str, str], alphabet: Set[str], unknown: str
) -> Dict[str, str]:
    """Rules for several characters that change ids: source to target, its unknown characters made ``unknown``."""
    by_single_rules, targets = _Seen(singles, alphabet, unknown), _Seen({}, alphabet, unknown)
    runs = re.compile(f"{unknown}+")  # one id each
    needed: Dict[str, str] = {}
    for source in sorted((source for source in rules if len(source) > 1), key=len):
        target = runs.sub(unknown, rules[source].translate(targets))
        if target != runs.sub(unknown, source.translate(by_single_rules)) or _has_part(source, needed):
            needed[source] = target
    return needed


def _has_part(source: str, rules: Mapping[str, str]) -> bool:
    """Whether a shorter rule would apply inside ``source``."""
    length = len(source)
    return any(source[i:j] in rules for i in range(length) for j in range(i + 2, length + 1) if j - i < length)


def _by_length(rules: Mapping[str, str]) -> Iterator[Tuple[int, Dict[str, List[str]]]]:
    """Number of characters, and target to sources of that length; of two rules that fit at a place the longer holds."""
    lengths: Dict[int, Dict[str, List[str]]] = defaultdict(lambda: defaultdict(list))
    for source, target in rules.items():
        lengths[len(source)][target].append(source)
    yield from sorted(lengths.items(), reverse=True)


def _alternatives(sources: Iterable[str]) -> str:
    """A pattern for the first character of ``sources`` where the rest follows; equal rests share a class of characters."""
    continuations: Dict[str, List[str]] = defaultdict(list)
    for source in sources:
        continuations[source[0]].append(source[1:])
    first: Dict[Tuple[str, ...], List[str]] = defaultdict(list)
    for character, rest in continuations.items():
        first[tuple(sorted(rest))].append(character)
    return "|".join(
        f"[{''.join(map(_escaped, characters))}](?={'|'.join(''.join(map(_escaped, text)) for text in rest)})"
        for rest, characters in sorted(first.items())
    )


def _escaped(character: str) -> str:
    return f"\\x{{{ord(character):x}}}"
