"""Attention and dropout for CPUs."""
