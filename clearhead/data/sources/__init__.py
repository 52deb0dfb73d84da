"""Where training data comes from: files, tables and data sets, read line by line with every fault named."""
