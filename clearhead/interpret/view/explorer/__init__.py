"""The attention explorer: one self-contained HTML file, made from arrays."""
