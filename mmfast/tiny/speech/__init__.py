"""The embedded speech model: its texts, recordings and training."""
