"""SQuAD: official files and scores, decoding of answers, evaluation, and the whole experiment with its table."""
