"""The OpenAI-shaped HTTP interface."""
