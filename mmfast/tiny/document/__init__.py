"""The embedded model of documents: its pages and training."""
