"""Search methods that choose the next tokens: greedy search, sampling and beam search."""
