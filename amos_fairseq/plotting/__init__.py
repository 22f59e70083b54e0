"""Figures of training curves and fine-tuning scores: what ``amos plot`` draws."""
