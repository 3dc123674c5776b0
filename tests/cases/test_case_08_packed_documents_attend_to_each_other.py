"""Case 8: documents of a pack attend to each other, because borders were lost on the way to attention.

Reported for a mask of ones that switches the detection of packing off, for keyword arguments that a model swallows,
and for positions that restart without anything else. A document in a pack gives what it gives alone, and does not
change when its neighbour does.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from shoal.config import LLMConfig, load_config
from shoal.data.text import Tokens
from shoal.data.text_batches import packed
from shoal.models.causal_lm import CausalLM
from shoal.parallel.model import ParallelModel
from shoal.train.llm_data import TextData
from shoal.train.llm_plans import causal_lm_plan, load_llm_tokenizer
from tests.families import FAMILIES

A, B = 5, 6


def _model(root: Path, **changes: Any) -> CausalLM:
    fields = {
        "model_type": "llama",
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "initializer_range": 0.3,
    }
    mapping = {
        "model": {"config": {**fields, **changes}},
        "tokenizer": "bytes",
        "packed_sequence": {"packed_sequence_size": A + B},
    }
    config = load_config(mapping)
    assert isinstance(config, LLMConfig)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = causal_lm_plan(config).build().double()
    assert isinstance(module, CausalLM)
    return module.eval()


def _document(length: int, seed: int) -> Tokens:
    ids = np.random.default_rng(seed).integers(0, 64, length)
    return Tokens(ids, np.ones(length, dtype=bool))


def _hidden(model: CausalLM, micro_batch: Mapping[str, Any]) -> Tensor:
    """Hidden states [T, H] of the pack, on the way that training takes."""
    with torch.no_grad():
        states: Tensor = model.llm.base_model(**model._inputs(micro_batch)).last_hidden_state
    return states[0]


def test_a_document_in_a_pack_is_the_document_alone(tmp_path: Path) -> None:
    model = _model(tmp_path)
    a, b = _document(A, 1), _document(B, 2)
    both = _hidden(model, packed([a, b], A + B, 0))
    torch.testing.assert_close(both[:A], _hidden(model, packed([a], A, 0)), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(both[A:], _hidden(model, packed([b], B, 0)), rtol=1e-12, atol=1e-12)


def test_a_document_does_not_change_with_its_neighbour(tmp_path: Path) -> None:
    model = _model(tmp_path)
    b = _document(B, 2)
    one = _hidden(model, packed([_document(A, 1), b], A + B, 0))
    other = _hidden(model, packed([_document(A, 3), b], A + B, 0))
    assert torch.equal(one[A:], other[A:])
    assert not torch.allclose(one[:A], other[:A])


@pytest.mark.parametrize("family", ["nemotron-h", "bamba", "granite-hybrid", "mamba2"])
def test_states_and_convolutions_stay_in_their_document(tmp_path: Path, family: str) -> None:
    """Layers that carry a state over all tokens; transformers' own would carry it into the next document."""
    model_type, settings = FAMILIES[family]
    model = _model(tmp_path, model_type=model_type, **settings)
    if hasattr(model.llm.config, "_experts_implementation"):
        model.llm.set_experts_implementation("eager")  # the grouped kernel has no float64
    b = _document(B, 2)
    one = _hidden(model, packed([_document(A, 1), b], A + B, 0))
    other = _hidden(model, packed([_document(A, 3), b], A + B, 0))
    assert torch.equal(one[A:], other[A:])
    assert not torch.allclose(one[:A], other[:A])
    # transformers' norms round to float32 in between.
    torch.testing.assert_close(one[A:], _hidden(model, packed([b], B, 0)), rtol=1e-5, atol=1e-6)


def test_without_borders_the_same_comparison_fails(tmp_path: Path) -> None:
    """The fault itself: one document as long as both shows how much a leak changes."""
    model = _model(tmp_path)
    a, b = _document(A, 1), _document(B, 2)
    whole = Tokens(np.concatenate([a.input_ids, b.input_ids]), np.ones(A + B, dtype=bool))
    leaking = _hidden(model, packed([whole], A + B, 0))
    alone = _hidden(model, packed([b], B, 0))
    assert float((leaking[A:] - alone).abs().max()) > 1e-2


def test_the_recipe_chooses_an_attention_that_gets_the_borders(tmp_path: Path) -> None:
    assert _model(tmp_path).llm.config._attn_implementation == "shoal"


@pytest.mark.parametrize(
    ("lengths", "reason", "long_documents"),
    [
        ([0, 4], "empty_document", "split"),
        ([11, 4], "longer_than_pack", "drop"),
        ([11, 4], "split_document", "split"),
    ],
)
def test_degenerate_documents_are_counted(
    tmp_path: Path, lengths: list[int], reason: str, long_documents: str
) -> None:
    from shoal.data.text_corpus import write_corpus

    write_corpus([list(range(n)) for n in lengths], tmp_path / "corpus", vocab_size=64, tokenizer="t")
    batch = _only_step(tmp_path / "corpus", {"packed_sequence_size": 8, "long_documents": long_documents})
    assert batch.error is None and batch.skipped == {reason: 1}
    real = sum(int(mb["text_lens"].sum()) for mb in batch.micro_batches if not mb["is_empty"])
    assert real == sum(n for n in lengths if reason != "longer_than_pack" or n <= 8)


def test_documents_without_a_supervised_token_take_room_and_no_part(tmp_path: Path) -> None:
    """A pack of one-token documents, and of chats without an answer, is a step of loss 0 and gradient 0."""
    from shoal.data.text_corpus import write_corpus

    write_corpus([[5]] * 3, tmp_path / "corpus", vocab_size=64, tokenizer="t")
    batch = _only_step(tmp_path / "corpus", {"packed_sequence_size": 4})
    (micro_batch,) = (mb for mb in batch.micro_batches if not mb["is_empty"])
    assert micro_batch["cu_seqlens"].tolist() == [0, 1, 2, 3] and not micro_batch["loss_mask"].any()
    model = _model(tmp_path)
    out = model(micro_batch)
    out["loss_sum"].backward()
    assert float(out["loss_sum"]) == 0.0 == float(out["num_tokens"])
    assert all(p.grad is not None and float(p.grad.abs().max()) == 0.0 for p in model.parameters())


def _only_step(corpus: Path, packing: dict[str, Any]) -> Any:
    mapping = {
        "model": {"config": {"model_type": "llama"}},
        "dataset": {"type": "tokens", "path": str(corpus)},
        "packed_sequence": packing,
        "step_scheduler": {"global_batch_size": 2, "local_batch_size": 1},
        "checkpoint": {"checkpoint_dir": str(corpus / "run")},
    }
    config = load_config(json.loads(json.dumps(mapping)))
    assert isinstance(config, LLMConfig)
    data = TextData(config, load_llm_tokenizer(config))
    model = ParallelModel(torch.nn.Identity(), lambda batch: {}, lambda last: None, None, torch.device("cpu"))  # type: ignore[arg-type, return-value]
    (batch,) = list(data.train_loader(model, 2, data.start_position(_start())))
    return batch


def _start() -> Any:
    from shoal.data.position import START

    return START
