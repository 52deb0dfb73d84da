"""How probable given text is: targets given their sources, and text by itself."""
