"""Checkpoints: atomic directories on disk and the state of a run inside them."""
