"""Loaders of text data: the same steps, sampler and loader as for speech, over documents."""

from __future__ import annotations

from dataclasses import replace

from shoal.config.llm import LLMConfig
from shoal.config.text import TextDatasetConfig
from shoal.data.position import START, StreamPosition
from shoal.data.steps import StepSampler
from shoal.data.stream import StepLoader, ValidationLoader, loader_options
from shoal.data.text import Documents
from shoal.data.text_batches import TextDataset
from shoal.data.text_stream import TextStream


def train_stream(config: LLMConfig, documents: Documents) -> TextStream:
    """Returns the global micro-batches of training."""
    assert config.dataset is not None
    return TextStream(
        documents,
        config.dataset,
        config.packed_sequence,
        rows=config.step_scheduler.local_batch_size,
        shuffle=config.dataloader.shuffle is not False,
        drop_last=config.dataloader.drop_last,
        key="dataset",
    )


def global_micro_batches(config: LLMConfig) -> int:
    """Returns the micro-batches of one optimizer step over the whole job, packs with packed sequences."""
    steps = config.step_scheduler
    return -(-steps.global_batch_size // steps.local_batch_size)


def text_train_loader(
    config: LLMConfig,
    documents: Documents,
    *,
    pad_id: int,
    dp_rank: int,
    dp_size: int,
    position: StreamPosition = START,
) -> StepLoader:
    """Builds the training loader of one data-parallel rank; one iteration goes to the end of the data epoch.

    Args:
        config: The whole configuration.
        documents: Those of its ``dataset`` section.
        pad_id: Id on padded positions.
        dp_rank: This rank's data-parallel coordinate; peers in tensor, context and pipeline groups share it.
        dp_size: Number of data-parallel coordinates.
        position: Where to start.
    """
    sampler = StepSampler(
        train_stream(config, documents),
        dp_rank=dp_rank,
        dp_size=dp_size,
        global_micro_batches=global_micro_batches(config),
        order_seed=config.rng.seed,
        position=position,
        steps_per_epoch=None,
    )
    pack_size = config.packed_sequence.packed_sequence_size
    dataset = TextDataset(documents, pad_id, seed=config.rng.seed, pack_size=pack_size)
    options = loader_options(config.dataloader.num_workers, config.dataloader.pin_memory)
    return StepLoader(dataset, sampler=sampler, **options)


def steps_of_epoch(config: LLMConfig, documents: Documents) -> int:
    """Returns the optimizer steps of the first epoch; with packs this asks for the length of every document."""
    sampler = StepSampler(
        train_stream(config, documents),
        dp_rank=0,
        dp_size=1,
        global_micro_batches=global_micro_batches(config),
        order_seed=config.rng.seed,
        position=START,
        steps_per_epoch=None,
    )
    return sampler.count_steps()


def text_validation_loader(
    config: LLMConfig,
    dataset: TextDatasetConfig,
    documents: Documents,
    *,
    key: str,
    pad_id: int,
    dp_rank: int,
    dp_size: int,
) -> ValidationLoader:
    """Builds the loader of one validation set: all of its documents in order, each once.

    A step is one micro-batch per rank; the last step is filled up with empty ones, so all ranks take the same
    number of steps. Documents are packed where training packs them, and a long one is then split, never dropped.
    """
    loader = config.validation_dataloader
    packing = replace(config.packed_sequence, max_packs=None, long_documents="split")
    stream = TextStream(
        documents,
        dataset,
        packing,
        rows=loader.batch_size or config.step_scheduler.local_batch_size,
        shuffle=False,
        drop_last=False,
        key=key,
    )
    sampler = StepSampler(
        stream,
        dp_rank=dp_rank,
        dp_size=dp_size,
        global_micro_batches=dp_size,
        order_seed=config.rng.seed,
        position=START,
        steps_per_epoch=None,
    )
    loaded = TextDataset(
        documents, pad_id, seed=config.rng.seed, pack_size=config.packed_sequence.packed_sequence_size
    )
    return ValidationLoader(loaded, sampler=sampler, **loader_options(loader.num_workers, loader.pin_memory))
