"""All raw forms, once: text, tables, words, questions, labels. No torch, no fairseq."""

import re

TEXT_COLUMN, LABEL_COLUMN = "text", "label"  # of tables and JSON lines
BLANK, LINE = "blank", "line"  # what ends a document of plain text
# The end of the message about a file that is none of these.
FORMS = (
    "read are plain text in UTF-8, .jsonl, .tsv, .csv, .parquet and folders of datasets, compressed as .gz, .xz or .zst; "
    "docs/converting.md has commands for other forms"
)
# A character of Thai, Lao, Burmese, Khmer, kana or Han: a text has no spaces between their words.
UNSPACED = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\uff66-\uff9f"
    "\U00020000-\U0003ffff]"
)
