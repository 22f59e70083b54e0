"""Raw text to tokens, behind ``amos prepare text``: readers of files, the vocabulary, tokenizers, binarizing."""

# Pieces to learn. AMOS, section 4: 32,768 uncased (base), 64,000 cased SentencePiece (base++).
DEFAULT_VOCAB_SIZE = 32_768
TEXT_COLUMN = "text"  # of tables and JSON lines
MANIFEST = "corpus.json"  # of a corpus: settings, counts, hashes
