"""Reading comprehension on SQuAD: official files, decoding of answers, official metrics, and the ``amos squad`` benchmark."""
