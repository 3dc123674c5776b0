"""The stream of text micro-batches: whole epochs, one order for every layout, resumption at any step."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from shoal.config import LLMConfig, load_config
from shoal.data.batch import StepBatch
from shoal.data.byte_tokenizer import byte_tokenizer
from shoal.data.position import START, StreamPosition
from shoal.data.text import Documents, Piece, Tokens, open_documents
from shoal.data.text_batches import packed, padded
from shoal.data.text_loaders import (
    steps_of_epoch,
    text_train_loader,
    text_validation_loader,
)

NUM = 53
PAD = 257


def texts() -> list[str]:
    """Texts of 1 to 40 bytes; each contains its number."""
    generator = np.random.default_rng(0)
    return [f"{index:02d}" + "x" * int(generator.integers(0, 38)) for index in range(NUM)]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "train.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts()))
    return file


def config_of(data: Path, *, packing: dict[str, Any] | None = None, **sections: Any) -> LLMConfig:
    mapping = {
        "model": {"config": {"model_type": "llama"}},
        "dataset": {"type": "text", "path": str(data), **sections.pop("dataset", {})},
        "step_scheduler": {"global_batch_size": 12, "local_batch_size": 3},
        "packed_sequence": packing or {},
        **sections,
    }
    config = load_config(mapping)
    assert isinstance(config, LLMConfig)
    return config


PACKED = {
    "packing": {"packed_sequence_size": 64, "packing_strategy": "best_fit", "open_packs": 4},
    "step_scheduler": {"global_batch_size": 4, "local_batch_size": 1},
}
VARIANTS: dict[str, dict[str, Any]] = {
    "rows": {},
    "rows-split": {"dataset": {"seq_length": 16}},
    "packs": PACKED,
    "packs-greedy-with-workers": {
        **PACKED,
        "packing": {"packed_sequence_size": 64},
        "dataloader": {"num_workers": 2},
    },
}


def documents_of(config: LLMConfig) -> Documents:
    assert config.dataset is not None
    return open_documents(config.dataset, byte_tokenizer(), "dataset")


def steps_on(
    config: LLMConfig, dp_size: int, position: StreamPosition = START, limit: int | None = None
) -> Iterator[list[StepBatch]]:
    """Yields, step by step, what every rank gets."""
    documents = documents_of(config)
    loaders = [
        iter(
            text_train_loader(config, documents, pad_id=PAD, dp_rank=rank, dp_size=dp_size, position=position)
        )
        for rank in range(dp_size)
    ]
    for number, step in enumerate(zip(*loaders, strict=True)):
        if number == limit:
            return
        yield list(step)


def global_order(step: Sequence[StepBatch]) -> list[tuple[str, ...]]:
    """The step's micro-batches as sample ids, in the order of the one global stream."""
    rounds = zip(*(batch.micro_batches for batch in step), strict=True)
    return [tuple(mb["sample_ids"]) for one in rounds for mb in one if not mb["is_empty"]]


def contents(micro_batch: dict[str, Any]) -> str:
    """All real text of a micro-batch."""
    ids = micro_batch["input_ids"]
    real = [row[: int(length)] for row, length in zip(ids, micro_batch["text_lens"], strict=True)]
    return str(byte_tokenizer().decode(torch.cat(real).tolist()))


@pytest.mark.parametrize("name", VARIANTS)
def test_an_epoch_holds_every_token_once(data: Path, name: str) -> None:
    config = config_of(data, **VARIANTS[name])
    steps = list(steps_on(config, 2))
    text = "".join(
        contents(mb) for step in steps for batch in step for mb in batch.micro_batches if not mb["is_empty"]
    )
    assert Counter(text) == Counter("".join(f"{one}<|end|>" for one in texts()))
    assert steps_of_epoch(config, documents_of(config)) == len(steps)
    assert all(batch.error is None for step in steps for batch in step)


@pytest.mark.parametrize("name", VARIANTS)
def test_order_does_not_depend_on_the_layout(data: Path, name: str) -> None:
    config = config_of(data, **VARIANTS[name])
    orders = [[global_order(step) for step in steps_on(config, dp_size)] for dp_size in (1, 2, 4)]
    assert orders[0] == orders[1] == orders[2]
    counts = [[len(batch.micro_batches) for batch in step] for step in steps_on(config, 2)]
    assert {count for step in counts for count in step} == {2}  # the unfinished last step too


def test_every_epoch_has_its_own_permutation_of_the_whole(data: Path) -> None:
    config = config_of(data)
    orders = [
        [
            name
            for step in steps_on(config, 1, StreamPosition(epoch))
            for names in global_order(step)
            for name in names
        ]
        for epoch in (0, 1, 0)
    ]
    assert orders[0] == orders[2] != orders[1]
    assert sorted(orders[0]) == sorted(orders[1]) and len(orders[0]) == NUM
    first_half = sum(int(name.split(":")[0]) < NUM // 2 for name in orders[0][: NUM // 2])
    assert 5 < first_half < 21  # mixed over the whole data set, not in a buffer
    other = replace(config, rng=replace(config.rng, seed=7))
    assert [n for s in steps_on(other, 1) for names in global_order(s) for n in names] != orders[0]


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("stop", [1, 3])
def test_resumed_on_another_layout_continues_exactly(data: Path, name: str, stop: int) -> None:
    config = config_of(data, **VARIANTS[name])
    whole = [global_order(step) for step in steps_on(config, 1)]
    head = list(steps_on(config, 4, limit=stop))
    position = head[-1][0].position
    assert {batch.position for batch in head[-1]} == {position}
    tail = [global_order(step) for step in steps_on(config, 2, position)]
    assert [global_order(step) for step in head] + tail == whole


def test_after_the_last_step_comes_the_next_epoch(data: Path) -> None:
    config = config_of(data, **PACKED)
    last = list(steps_on(config, 2))[-1][0].position
    assert last == StreamPosition(1, 0)
    assert next(iter(steps_on(config, 2, last)))[0].position.epoch == 1


def test_unshuffled_keeps_the_order_of_the_data(data: Path) -> None:
    config = config_of(data, dataloader={"shuffle": False})
    names = [name for step in steps_on(config, 1) for one in global_order(step) for name in one]
    assert [int(name.split(":")[0]) for name in names] == list(range(NUM))


def test_drop_last_leaves_the_unfinished_step_out_and_says_so(data: Path) -> None:
    config = config_of(data, dataloader={"drop_last": True})
    steps = list(steps_on(config, 2))
    assert len(steps) == NUM // 12
    assert all(len(global_order(step)) == 4 for step in steps)


@pytest.mark.parametrize(
    ("dataset", "reason"),
    [
        ({"seq_length": 16, "truncation": True}, "truncated_document"),
        ({"seq_length": 16}, "longer_than_seq_length"),
    ],
)
def test_long_rows_are_cut_or_left_out_and_counted(
    tmp_path: Path, dataset: dict[str, Any], reason: str
) -> None:
    file = tmp_path / "qa.jsonl"
    rows = [{"q": "a" * (3 * index), "a": "b"} for index in range(1, 12)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    mapping = {"question": "q", "answer": "a"}
    section = {"type": "instruction", "column_mapping": mapping, "chat_template": "none", **dataset}
    config = config_of(file, dataset=section)
    batches = [batch for step in steps_on(config, 1) for batch in step]
    lengths = [
        int(n) for b in batches for mb in b.micro_batches if not mb["is_empty"] for n in mb["text_lens"]
    ]
    full = [3 * index + 3 for index in range(1, 12)]  # question, space, answer, end
    long = [length for length in full if length > 16]
    kept = [length for length in full if length <= 16]
    assert sorted(lengths) == sorted(kept + [16] * len(long) if "truncation" in dataset else kept)
    assert sum(batch.skipped.get(reason, 0) for batch in batches) == len(long)


def test_validation_sees_everything_once_on_any_number_of_ranks(data: Path) -> None:
    config = config_of(data, validation_dataset={"type": "text", "path": str(data)}, **PACKED)
    dataset = config.validation_datasets["default"]
    for dp_size in (1, 2, 3):
        documents = open_documents(dataset, byte_tokenizer(), "validation_dataset")
        loaders = [
            text_validation_loader(
                config, dataset, documents, key="v", pad_id=PAD, dp_rank=rank, dp_size=dp_size
            )
            for rank in range(dp_size)
        ]
        for _ in range(2):  # each pass starts from the beginning
            batches = [list(loader) for loader in loaders]
            assert len({len(one) for one in batches}) == 1 == len({len(loader) for loader in loaders})
            text = "".join(
                contents(mb) for one in batches for b in one for mb in b.micro_batches if not mb["is_empty"]
            )
            assert Counter(text) == Counter("".join(f"{one}<|end|>" for one in texts()))


def test_a_row_that_cannot_be_read_is_the_steps_error_on_its_rank(tmp_path: Path) -> None:
    file = tmp_path / "chat.jsonl"
    good = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    bad = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": None}]}
    file.write_text("".join(json.dumps(row) + "\n" for row in [good, good, good, bad]))
    template = "{% for m in messages %}{{ m['content'] }}{{ eos_token }}{% endfor %}"
    config = config_of(
        file, dataset={"type": "chat", "chat_template": template}, dataloader={"shuffle": False},
        step_scheduler={"global_batch_size": 2, "local_batch_size": 1},
    )  # fmt: skip
    steps = list(steps_on(config, 2))
    assert [batch.error is None for step in steps for batch in step] == [True, True, True, False]
    assert "row 3" in str(steps[1][1].error) and "content" in str(steps[1][1].error)


def _tokens(*lengths: int) -> list[Tokens]:
    return [
        Tokens(np.arange(10 * n, 10 * n + length), np.ones(length, dtype=bool))
        for n, length in enumerate(lengths, 1)
    ]


def test_packed_micro_batch() -> None:
    batch = packed(_tokens(3, 1, 2), 8, PAD)
    assert batch["input_ids"].tolist() == [[10, 11, 12, 20, 30, 31, PAD, PAD]]  # type: ignore[union-attr]
    assert batch["loss_mask"].tolist() == [[False, True, True, False, False, True, False, False]]  # type: ignore[union-attr]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 0, 1, 0, 1]]  # type: ignore[union-attr]
    assert batch["cu_seqlens"].tolist() == [0, 3, 4, 6] and batch["cu_seqlens"].dtype == torch.int32  # type: ignore[union-attr]
    assert batch["text_lens"].tolist() == [6] and batch["max_seqlen"] == 3  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="do not fit a pack of 5"):
        packed(_tokens(3, 3), 5, PAD)


def test_padding_of_a_pack_stands_at_no_position_that_its_documents_have_not() -> None:
    """A table of positions could end there, and rotary embeddings can choose their frequencies by the largest."""
    batch = packed(_tokens(3, 1), 12, PAD)
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, *(0, 1, 2) * 2, 0, 1]]  # type: ignore[union-attr]


def test_padded_micro_batch_never_supervises_a_first_token() -> None:
    batch = padded(_tokens(3, 1), PAD)
    assert batch["input_ids"].tolist() == [[10, 11, 12], [20, PAD, PAD]]
    assert batch["loss_mask"].tolist() == [[False, True, True], [False, False, False]]
    assert padded(_tokens(1), PAD)["input_ids"].tolist() == [[10, PAD]]
    assert Piece(3, 0, 4).id == "3:0+4"
