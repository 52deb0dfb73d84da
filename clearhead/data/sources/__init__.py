"""Sources of training data: text files, tables and data sets, read with an exact message for every fault."""
