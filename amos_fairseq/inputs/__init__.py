"""All raw forms, once: text, tables, words, questions, labels. No torch, no fairseq."""

TEXT_COLUMN, LABEL_COLUMN = "text", "label"  # of tables and JSON lines
BLANK, LINE = "blank", "line"  # what ends a document of plain text
# The end of the message about a file that is none of these.
FORMS = (
    "read are plain text in UTF-8, .jsonl, .tsv, .csv, .parquet and folders of datasets, compressed as .gz, .xz or .zst; "
    "docs/converting.md has commands for other forms"
)
