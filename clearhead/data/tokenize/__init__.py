"""From documents and texts to ids: tokenizers that are trained once, and documents of any length."""
