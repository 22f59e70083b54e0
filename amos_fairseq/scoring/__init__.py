"""How likely a model finds a text: pseudo-log-likelihoods, and re-ranking with them (thesis section 5.4.5)."""
