"""Preparation of text. In a checkout its modules are in the folder ``preprocess`` at the top; a wheel has them here."""

from pathlib import Path

__path__ = [str(Path(__file__).resolve().parents[2] / "preprocess")]
