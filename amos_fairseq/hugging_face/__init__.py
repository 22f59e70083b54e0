"""Hugging Face: import of model folders, export with verification and model card."""
