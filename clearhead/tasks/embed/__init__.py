"""Text embedding: texts of one meaning get vectors that are near each other."""
