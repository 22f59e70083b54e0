"""Sequence tagging: scores of words and spans, evaluation, and the whole experiment with its table."""
