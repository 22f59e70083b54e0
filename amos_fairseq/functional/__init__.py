"""Pure tensor functions. They depend on PyTorch alone, not on fairseq, modules or configurations."""
