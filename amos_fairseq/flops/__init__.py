"""Floating point operations of a training run, counted on the model and criterion that would be trained."""
