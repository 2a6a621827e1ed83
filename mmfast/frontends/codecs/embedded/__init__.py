"""The codec of the embedded speech model."""
