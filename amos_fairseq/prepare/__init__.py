"""Raw files to the data that training reads, behind ``amos prepare KIND``: text, GLUE, SQuAD, labeled words, edge probing."""

# Pieces to learn. AMOS, section 4: 32,768 uncased (base), 64,000 cased SentencePiece (base++).
DEFAULT_VOCAB_SIZE = 32_768
# Of GLUE's official files; the variable names a mirror.
GLUE_BASE_URL, GLUE_BASE_URL_VARIABLE = "https://dl.fbaipublicfiles.com", "GLUE_BASE_URL"
TEXT_COLUMN = "text"  # of tables and JSON lines
