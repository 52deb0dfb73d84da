"""Text generation: logits processors, search methods, continuations, translations and their scores."""
