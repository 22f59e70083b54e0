"""Labels of words."""
