"""Training data of the nano checkpoint: sources, generators, tokenizer and packing."""
