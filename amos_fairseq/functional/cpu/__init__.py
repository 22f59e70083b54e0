"""Attention, dropout and linear layers for CPUs."""
