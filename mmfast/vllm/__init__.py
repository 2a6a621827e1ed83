"""A vLLM plugin: fixed budgets per item, chosen by the vision encoder's own scores."""
