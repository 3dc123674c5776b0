"""The data of an LLM run: documents opened once, loaders that know where the run stands in them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

from typing_extensions import override

from shoal.config.llm import LLMConfig
from shoal.data.chat import pad_id_of
from shoal.data.position import StreamPosition
from shoal.data.stream import StepLoader, ValidationLoader
from shoal.data.text import Documents, open_documents
from shoal.data.text_loaders import (
    global_micro_batches,
    steps_of_epoch,
    text_train_loader,
    text_validation_loader,
)
from shoal.parallel.model import ParallelModel
from shoal.train.data import StreamData


class TextData(StreamData):
    """Training and validation documents of an LLM run.

    Args:
        config: The whole configuration.
        tokenizer: A transformers tokenizer; None when all data has its tokens.

    Raises:
        ValueError: A data set is missing or of another form; here, before any process waits for another.
    """

    def __init__(self, config: LLMConfig, tokenizer: Any) -> None:
        super().__init__(global_micro_batches(config))
        self.config = config
        self.pad_id = 0 if tokenizer is None else pad_id_of(tokenizer)
        assert config.dataset is not None
        self.documents = open_documents(config.dataset, tokenizer, "dataset")
        self.validation: dict[str, Documents] = {
            name: open_documents(dataset, tokenizer, validation_key(name))
            for name, dataset in sorted(config.validation_datasets.items())
        }

    @cached_property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of the first epoch; with packs this measures every document."""
        return steps_of_epoch(self.config, self.documents)

    @override
    def train_loader(
        self, model: ParallelModel, global_micro_batches: int, position: StreamPosition
    ) -> StepLoader:
        return text_train_loader(
            self.config,
            self.documents,
            pad_id=self.pad_id,
            dp_rank=model.dp_rank,
            dp_size=model.dp_size,
            position=position,
        )

    @override
    def validation_names(self) -> tuple[str, ...]:
        return tuple(self.validation)

    @override
    def validation_loaders(self, model: ParallelModel) -> Mapping[str, ValidationLoader]:
        return {
            name: text_validation_loader(
                self.config,
                self.config.validation_datasets[name],
                documents,
                key=validation_key(name),
                pad_id=self.pad_id,
                dp_rank=model.dp_rank,
                dp_size=model.dp_size,
            )
            for name, documents in self.validation.items()
        }


def validation_key(name: str) -> str:
    """The key of a validation set in the YAML file."""
    return "validation_dataset" if name == "default" else f"validation_dataset_{name}"
