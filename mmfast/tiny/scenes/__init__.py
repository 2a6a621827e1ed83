"""The larger embedded world: clips and pictures of shapes and numbers before any background."""
