"""The embedded model of streams: its world, questions and training."""
