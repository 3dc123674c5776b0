"""Answers, word error rates and losses of trained models."""

from shoal.evaluate.run import run_evaluation, run_generation

__all__ = ["run_evaluation", "run_generation"]
