"""One encoder for several tasks, with or without teachers (BAM; thesis, chapter 3)."""
