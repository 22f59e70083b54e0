"""Scoring of text by a model: pseudo-log-likelihoods, and re-ranking with them (thesis section 5.4.5)."""
