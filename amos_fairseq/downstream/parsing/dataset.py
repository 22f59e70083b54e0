"""Dependency trees: the files of sequence tagging with the relation of each word as its label, and the number of its head.

``amos parse`` writes, beside the files of :mod:`amos_fairseq.downstream.tagging.dataset`:

SPLIT.head.{bin,idx}                            head of each word: 0 for the root, else the number of a word from 1 on
SPLIT.conllu                                    the sentences as they were given
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fairseq.data import Dictionary

from amos_fairseq.data.corpus import open_lines
from amos_fairseq.downstream.tagging.dataset import NO_LABEL, TaggedSentences

HEAD = "head"
LIKELY_HEADS = 4  # of a word, in the first search for a tree


class ParsedSentences(TaggedSentences):
    """The sentences of a split with their trees; for the arguments see ``TaggedSentences``.

    Words whose head is cut are not trained on.

    Raises:
        UserError: as there, or a head is no word of its sentence.
    """

    def __init__(
        self,
        directory: Path,
        split: str,
        dictionary: Dictionary,
        num_relations: int,
        max_tokens: int,
        seed: int = 0,
        training: bool = False,
    ) -> None:
        super().__init__(directory, split, dictionary, num_relations, max_tokens, seed, training)
        self.num_relations = num_relations
        self._heads = open_lines(f"{self.source}.{HEAD}", "give OUT/data/parsing of amos parse")
        if not np.array_equal(self._heads.sizes, self._labels.sizes) or any(
            len(heads) and not 0 <= int(heads.min()) <= int(heads.max()) <= len(heads) for heads in self._heads
        ):
            raise self._damaged()

    def heads(self, index: int) -> list[int]:
        """Return the head of each word of a sentence, also of those that are cut: 0 for the root."""
        return self._heads[int(self._rows[index])].tolist()

    def add_labels(self, batch: dict[str, Any], samples: Sequence[dict[str, Any]]) -> None:
        """Add what the data set of tagging adds, and ``all_words``, a Python int, with those that are cut.

        ``target`` LongTensor [B,W] is head * number of relations + relation, ``NO_LABEL`` in padded slots and for words whose
        head is cut.
        """
        super().add_labels(batch, samples)
        relations, target = batch["target"], torch.full_like(batch["target"], NO_LABEL)
        for row, sample in enumerate(samples):
            num_kept = len(sample["positions"])
            heads = torch.tensor(self.heads(sample["id"])[:num_kept], dtype=torch.long)
            pairs = heads * self.num_relations + relations[row, :num_kept]
            target[row, :num_kept] = pairs.where(heads <= num_kept, NO_LABEL)
        all_words = sum(len(sample["labels"]) for sample in samples)
        batch |= {"target": target, "nwords": int(target.ne(NO_LABEL).sum()), "all_words": all_words}


def greedy_heads(scores: np.ndarray) -> np.ndarray | None:
    """Return the best head of each word: scores [W,1+W] -> [W], 0 for the root; None if they are no tree with one root."""
    heads = scores.argmax(1)
    return heads if is_tree(heads) else None


def is_tree(heads: Sequence[int] | np.ndarray) -> bool:
    """Return whether exactly one word has the head 0, and each word leads to it."""
    heads = [int(head) for head in heads]
    if heads.count(0) != 1 or not all(0 <= head <= len(heads) for head in heads):
        return False
    reached = {0}
    for word in range(1, len(heads) + 1):
        path = []
        while word not in reached:
            if word in path:
                return False
            path.append(word)
            word = heads[word - 1]
        reached.update(path)
    return True


def best_tree(scores: np.ndarray) -> np.ndarray:
    """Return the heads of the tree with one root whose edges have the largest sum: scores [W,1+W] -> [W], 0 for the root.

    networkx takes half a second for all edges of 40 words. So a first tree is found among the :data:`LIKELY_HEADS` best heads
    of each word. No edge is above the best one of its word, so an edge that is further below it than all edges of the first
    tree together are below theirs is in no better tree: the search is repeated only if another edge is left.
    """
    heads = greedy_heads(scores)
    if heads is not None:
        return heads
    words = np.arange(len(scores))
    below = scores.max(1, keepdims=True) - scores
    likely = below <= np.sort(below, axis=1)[:, min(LIKELY_HEADS, len(scores)) - 1, None]
    likely[:, 0] = True
    heads = _spanning_tree(scores, likely)
    # With several roots it says nothing of the trees that are allowed.
    possible = below <= below[words, heads].sum() + 1e-9 if is_tree(heads) else np.ones_like(likely)
    return _spanning_tree(scores, possible | likely) if (possible & ~likely).any() else heads


def _spanning_tree(scores: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Return the heads of the best tree with one root made of ``edges``, [W,1+W] bool, those of the root among them.

    Universal Dependencies ask for exactly one root. A constant that is larger than any difference of sums is taken from the
    edges of the root, so that the best tree has as few of them as possible: one.
    """
    import networkx  # here: it takes a quarter of a second, and most runs predict no trees

    finite = scores[np.isfinite(scores)]
    penalty = 1 + len(scores) * float(finite.max() - finite.min())
    graph = networkx.DiGraph()
    for word, head in np.argwhere(edges & np.isfinite(scores)).tolist():
        graph.add_edge(head, word + 1, weight=float(scores[word, head]) - penalty * (head == 0))
    heads = np.zeros(len(scores), dtype=np.int64)
    for head, word in networkx.maximum_spanning_arborescence(graph).edges:
        heads[word - 1] = head
    return heads


def attachment_counts(
    gold: Sequence[tuple[int, str]], found: Sequence[tuple[int, str]], with_punctuation: bool = True
) -> dict[str, int]:
    """Count words, right heads, and right heads with the right relation, by the rules of the official evaluation of the CoNLL
    2018 shared task on gold words: relations are compared without their subtypes.

    Args:
        gold, found: head and relation of each word of a sentence; words that are cut are missing at the end of ``found``.
        with_punctuation: count words whose true relation is ``punct``.
    """
    counts = {"words": 0, "heads": 0, "edges": 0}
    for index, (head, relation) in enumerate(gold):
        relation = relation.partition(":")[0]
        if relation == "punct" and not with_punctuation:
            continue
        counts["words"] += 1
        if index < len(found) and found[index][0] == head:
            counts["heads"] += 1
            counts["edges"] += found[index][1].partition(":")[0] == relation
    return counts
