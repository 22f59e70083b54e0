"""Datasets: blocks of tokens with masked positions, their order, and the seeds of all random numbers."""
