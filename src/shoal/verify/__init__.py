"""Proof that a layout does not change the numbers, on the user's own configuration: ``shoal verify``."""
