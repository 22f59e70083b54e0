"""Labels of words (tagging), trees of words (parsing), and cross-view training on unlabeled sentences."""
