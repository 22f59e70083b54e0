"""Criterions of pretraining: one file per objective, with the same name as its model."""
