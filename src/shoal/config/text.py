"""The data sections of the LLM recipe: a data set of text, packing, and the loader."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from shoal.config.values import CountInt, FrozenDict, PositiveInt

TextDatasetType = Literal["chat", "instruction", "squad", "hellaswag", "text", "tokens"]


@dataclass(frozen=True)
class TextDatasetConfig:
    """One data set of documents.

    `path` is a file, several files, a folder or the name of a data set on the hub. What a row holds follows from
    `type`: ``chat`` a list of messages; ``instruction`` the columns that column_mapping names as context,
    question and answer; ``squad`` and ``hellaswag`` the columns of those data sets; ``text`` a text; ``tokens``
    is a folder written by ``scripts/tokenize_corpus.py``.

    seq_length is the longest document: longer ones are cut with truncation, else left out and counted; ``text``
    and ``tokens`` are split into pieces of seq_length instead. chat_template is Jinja text or a file of it;
    ``none`` ignores the tokenizer's own, so that an instruction is its prompt followed by its answer.
    """

    path: str | tuple[str, ...]
    type: TextDatasetType = "chat"
    name: str | None = None
    split: str = "train"
    column_mapping: Mapping[str, str] = field(default_factory=FrozenDict)
    messages_column: str = "messages"
    text_column: str = "text"
    sample_by: Literal["line", "paragraph", "document"] = "document"
    chat_template: str | None = None
    answer_only_loss_mask: bool = True
    seq_length: PositiveInt | None = None
    truncation: bool = False
    limit_dataset_samples: PositiveInt | None = None


@dataclass(frozen=True)
class PackedSequenceConfig:
    """Several documents in one sequence of packed_sequence_size tokens; 0 switches packing off.

    ``greedy`` (AutoModel: thd) fills one pack after the other in the order of the data; ``best_fit`` (neat) keeps
    `open_packs` packs open and puts a document where it leaves the least room. A document longer than a pack is
    split into pieces that do not see each other, or dropped; both are counted.
    """

    packed_sequence_size: CountInt = 0
    packing_strategy: Literal["greedy", "best_fit"] = "greedy"
    max_packs: PositiveInt | None = None
    open_packs: PositiveInt = 64
    long_documents: Literal["split", "drop"] = "split"


@dataclass(frozen=True)
class DataloaderConfig:
    """Options of a data loader; shuffle None means True for training and False for validation.

    batch_size is the rows of a validation micro-batch, None takes step_scheduler.local_batch_size.
    """

    shuffle: bool | None = None
    batch_size: PositiveInt | None = None
    num_workers: CountInt = 0
    pin_memory: bool = False
    drop_last: bool = False
