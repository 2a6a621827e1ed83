"""Model families: what is particular to each, and how a reduction enters the forward pass."""
