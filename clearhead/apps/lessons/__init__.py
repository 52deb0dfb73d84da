"""Lessons in a terminal: their text, pictures and exercises, without a notebook."""
