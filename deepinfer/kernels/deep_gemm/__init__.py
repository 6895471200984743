"""FP8 matrix products for Hopper: dense, grouped for mixtures of experts, and the indexer's logits."""
