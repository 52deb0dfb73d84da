"""Translation: generate the translation of a text token by token."""
