"""The model a user holds, and where it is loaded from."""
