"""Log-probabilities of targets given their sources, of texts alone, and the accuracy of labels."""
