"""Token classification: predict a tag for each word of a text."""
