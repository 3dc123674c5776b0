"""Context parallelism: the ranks of a group share the tokens of each micro-batch."""
