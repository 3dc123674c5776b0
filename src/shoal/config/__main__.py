"""``python -m shoal.config`` prints the support matrix of docs/configuration.md."""

from shoal.config import support_matrix

print(support_matrix(), end="")
