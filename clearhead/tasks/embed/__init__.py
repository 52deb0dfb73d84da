"""Text embedding: map texts with the same meaning to similar vectors."""
