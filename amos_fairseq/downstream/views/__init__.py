"""Cross-view training on unlabeled sentences (CVT; thesis, chapter 4)."""
