"""Data: sources, the one stream of global micro-batches, and loaders of optimizer steps."""
