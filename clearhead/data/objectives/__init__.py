"""Training objectives on plain text: masked tokens, span corruption, infilling, prefixes."""
