"""How the next tokens are found: greedy and sampling, beam search, contrastive search."""
