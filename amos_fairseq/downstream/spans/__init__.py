"""Answer spans: SQuAD 1.1 and 2.0."""
