"""Scoring of text by a model: pseudo-log-likelihoods (thesis section 5.4.5), and accuracy on minimal pairs."""
