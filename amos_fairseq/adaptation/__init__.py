"""``amos adapt``: a released encoder, or one of your own, is pretrained further on a text."""
