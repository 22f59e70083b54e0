"""Cross-view training on unlabeled sentences (CVT; thesis, chapter 4): the names of the views.

``modules.py`` predicts from them; ``training.py`` has the sentences and the loss.
"""

from collections.abc import Sequence

from amos_fairseq.errors import UserError

FULL, WORD_DROPOUT = "full", "word_dropout"
# View -> the direction of attention that gives the states that it reads.
DIRECTIONS = {"forward": "past", "backward": "future", "future": "past", "past": "future"}
TAGGING_VIEWS = (FULL, *DIRECTIONS)
# Of the word as a head, and of the word as a dependent (section 4.2.3).
PARSING_VIEWS = (FULL, *(f"{head}-{word}" for head in ("forward", "backward") for word in ("forward", "backward")))
CROSS_VIEWS = "cross_views."  # prefix of the weights of the modules, which only train


def parse_views(text: str, known: Sequence[str]) -> tuple[str, ...]:
    """Return the views in ``a,b,...``, in the order of ``known``, which is that of their parameters in the optimizer; raise
    :class:`UserError` unless each is known and there once."""
    views = tuple(name.strip() for name in text.split(",")) if text.strip() else ()
    allowed = (*known, WORD_DROPOUT)
    for view in views:
        if view not in allowed or views.count(view) > 1:
            what = "is there twice" if view in allowed else "is no view"
            raise UserError(f"--views {text}: {view!r} {what}: give some of {','.join(allowed)}")
    return tuple(view for view in allowed if view in views)


def check_encoder_learns(is_frozen: bool) -> None:
    if is_frozen:
        raise UserError("--views train the encoder, which --freeze-encoder keeps as it is: leave one of them out")
