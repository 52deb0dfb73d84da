"""How the next tokens are found: greedy search, sampling and beam search."""
