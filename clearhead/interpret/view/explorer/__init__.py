"""The attention explorer: one self-contained HTML file, built from arrays."""
