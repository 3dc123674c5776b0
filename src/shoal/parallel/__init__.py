"""How one model is spread over the ranks: one file per axis."""
