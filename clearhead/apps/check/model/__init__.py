"""Checks of a loaded model: information flow, invariances, and health of its weights."""
