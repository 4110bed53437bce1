"""Listeners: what users write to open, close and decorate in executors and workers. Standard library only."""
