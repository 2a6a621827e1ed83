"""Rows by index in every head: the op that KV policies compact keys and values with."""

from mmfast.core.gather_rows import gather_rows as gather_rows
