"""Data: sources, the one stream of global micro-batches, and loaders of optimizer steps."""

from shoal.data.conversation import AudioTurn, Conversation, EncodedPrompt, PromptEncoder, TextTurn
from shoal.data.dataset import MicroBatch, StepBatch, StepDataset, empty_micro_batch
from shoal.data.position import StepPlan, StreamPosition
from shoal.data.seeds import derive_seed, draw_entropy
from shoal.data.steps import StepSampler
from shoal.data.stream import (
    StepLoader,
    ValidationLoader,
    build_train_loader,
    build_validation_loaders,
    order_seed_of,
)

__all__ = [
    "AudioTurn",
    "Conversation",
    "EncodedPrompt",
    "MicroBatch",
    "PromptEncoder",
    "StepBatch",
    "StepDataset",
    "StepLoader",
    "StepPlan",
    "StepSampler",
    "StreamPosition",
    "TextTurn",
    "ValidationLoader",
    "build_train_loader",
    "build_validation_loaders",
    "derive_seed",
    "draw_entropy",
    "empty_micro_batch",
    "order_seed_of",
]
