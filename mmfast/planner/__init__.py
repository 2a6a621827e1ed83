"""Choosing a method, a site and a budget for what the caller wants to spend."""
