"""Pure tensor functions; nothing here knows fairseq, modules or configurations."""
