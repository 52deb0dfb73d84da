"""What a trained model says about a text: classes, tags, missing words, vectors, and how good that is."""
