"""Criterions: one file per objective, with the same name as its model, and ``squad`` for fine-tuning."""
