"""Listeners: stock models of transformers that write speech down, one file for each kind."""
