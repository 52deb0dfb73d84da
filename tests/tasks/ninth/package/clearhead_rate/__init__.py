"""A task for clearhead: predict a number, the rating of a text."""
