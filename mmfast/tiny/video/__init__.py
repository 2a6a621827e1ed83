"""The embedded video model: its world, questions and training."""
