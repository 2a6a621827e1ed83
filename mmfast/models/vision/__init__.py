"""Vision towers: merging, faster passes and the frame cache."""
