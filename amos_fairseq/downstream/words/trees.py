"""Dependency trees: the best one of the scores of edges, how much of a tree is right, and CoNLL-U with other trees."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

HEAD, RELATION = "head", "deprel"  # columns of CoNLL-U; "head" also names an array of prepared data
LIKELY_HEADS = 4  # of a word, in the first search for a tree
Edge = tuple[int, str]  # the number of the head, 0 for the root, and the relation


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

    networkx takes half a second for all edges of 40 words, so the first search is among the :data:`LIKELY_HEADS` best heads of
    each word. The loss of an edge is its distance from the best edge of its word, and the loss of a tree is the sum of its
    edges'. No loss is below 0, so an edge with more loss than the whole first tree is in no better tree. The search is repeated
    with the edges that have less, if the first one left out any.
    """
    heads = greedy_heads(scores)
    if heads is not None:
        return heads
    words = np.arange(len(scores))
    losses = scores.max(1, keepdims=True) - scores
    likely = losses <= np.sort(losses, axis=1)[:, min(LIKELY_HEADS, len(scores)) - 1, None]
    likely[:, 0] = True
    heads = _spanning_tree(scores, likely)
    # A first tree with several roots is no bound for those that are allowed.
    possible = losses <= losses[words, heads].sum() + 1e-9 if is_tree(heads) else np.ones_like(likely)
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


def attachment_counts(gold: Sequence[Edge], predicted: Sequence[Edge], with_punctuation: bool = True) -> dict[str, int]:
    """Count words, right heads, and right heads with the right relation, by the rules of the official evaluation of the CoNLL
    2018 shared task on gold words: relations are compared without their subtypes.

    Args:
        gold, predicted: one edge for each word of a sentence.
        with_punctuation: count words whose true relation is ``punct``.
    """
    counts = {"words": 0, "heads": 0, "edges": 0}
    for (head, relation), edge in zip(gold, predicted, strict=True):
        relation = relation.partition(":")[0]
        if relation == "punct" and not with_punctuation:
            continue
        counts["words"] += 1
        if edge[0] == head:
            counts["heads"] += 1
            counts["edges"] += edge[1].partition(":")[0] == relation
    return counts


def chains(train: Iterable[Sequence[Edge]], lengths: Sequence[int]) -> dict[str, list[list[Edge]]]:
    """Return, by name, trees without a model, of sentences of these lengths: each word depends on its neighbor, with the most
    frequent relation of the words of ``train`` that do so, punctuation left out."""
    found, of_neighbor = {}, {-1: Counter(), 1: Counter()}
    for tree in train:
        for word, (head, relation) in enumerate(tree, start=1):
            relation = relation.partition(":")[0]
            if head != 0 and abs(head - word) == 1 and relation != "punct":
                of_neighbor[head - word][relation] += 1
    for name, step in (("previous", -1), ("next", 1)):
        relation = of_neighbor[step].most_common(1)[0][0] if of_neighbor[step] else "dep"
        # The head of the first or the last word, which has no neighbor there, is the root.
        heads = [[(word + step) % (length + 1) for word in range(1, length + 1)] for length in lengths]
        found[f"the {name} word as head ({relation})"] = [[(head, relation) for head in tree] for tree in heads]
    return found


def tree_scores(gold: Sequence[Sequence[Edge]], predicted: Sequence[Sequence[Edge]]) -> dict[str, float]:
    """Return UAS and LAS in percent, with and without punctuation."""
    scores = {}
    for suffix, with_punctuation in (("", True), ("_no_punctuation", False)):
        counts: Counter[str] = Counter()
        for gold_tree, tree in zip(gold, predicted, strict=True):
            counts.update(attachment_counts(gold_tree, tree, with_punctuation))
        for name, key in (("las", "edges"), ("uas", "heads")):
            scores[name + suffix] = 100 * counts[key] / max(1, counts["words"])
    return scores


def with_cut_words(tree: Sequence[Edge], num_words: int) -> list[Edge]:
    """Give the words at the end that are cut, and have no edge, the relation ``dep`` to the word that depends on the root. If
    all words of the sentence are cut, the first one is that word."""
    tree = tree or [(0, "root")]
    root = next(number for number, (head, _) in enumerate(tree, start=1) if head == 0)
    return [*tree, *[(root, "dep")] * (num_words - len(tree))]


def with_trees(text: str, trees: Sequence[Sequence[Edge]]) -> str:
    """Return a CoNLL-U file with other heads and relations, and without enhanced dependencies and the empty nodes (``1.1``),
    which only these have; everything else in it stays."""
    lines, sentence = [], -1
    for line in re.split(r"(?<=\n)", text):  # other characters that end a line may be part of a word
        cells = line.rstrip("\r\n").split("\t")
        if re.fullmatch(r"[0-9]+\.[0-9]+", cells[0].strip(" ")):
            continue
        if not line.startswith("#") and cells[0].strip(" ").isdecimal():
            word = int(cells[0])
            sentence += word == 1
            cells[6:9] = [*map(str, trees[sentence][word - 1]), "_"]
            line = "\t".join(cells) + line[len(line.rstrip("\r\n")) :]
        lines.append(line)
    return "".join(lines)
