"""A task for clearhead: the rating of a text, which is a number."""
