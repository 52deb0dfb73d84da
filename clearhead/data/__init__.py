"""Training data: from text files to batches of token ids."""
