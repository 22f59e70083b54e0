"""Tasks: ``text_pretraining`` for every objective, and ``squad``."""
