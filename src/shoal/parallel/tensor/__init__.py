"""Tensor and sequence parallelism: weights of one layer over several ranks."""

from shoal.parallel.tensor.apply import TensorParallel, shard_tensor_parallel

__all__ = ["TensorParallel", "shard_tensor_parallel"]
