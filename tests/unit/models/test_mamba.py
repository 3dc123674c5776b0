"""Mamba-2 models with our scan give packed documents what transformers' own path gives each alone."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from shoal.kernels import ssd_chunked, ssd_convolution
from shoal.kernels.attention_hf import register_attention
from shoal.kernels.packable import packable
from shoal.models.causal_lm import CausalLM
from shoal.models.lora import add_lora
from shoal.models.mamba import substitute_mamba
from shoal.models.meta import parameters_on_meta
from shoal.parallel.activation_checkpointing import checkpoint_activations
from tests.unit.kernels.families import InDouble, tiny_model
from tests.unit.kernels.packs import running_sum
from tests.unit.kernels.test_attention_hf import (
    LENS,
    backward,
    one_by_one,
    packed,
    packed_inputs,
    tokens,
    worst,
)

HEADS: dict[str, Any] = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 2}
STATES: dict[str, Any] = {"mamba_d_state": 8, "mamba_chunk_size": 8}
FAMILIES: dict[str, dict[str, Any]] = {
    "granitemoehybrid": {"layer_types": ["mamba", "attention"], **HEADS, **STATES},
    "bamba": {"attn_layer_indices": [1], **HEADS, **STATES},
    "nemotron_h": {
        "layers_block_type": ["mamba", "moe", "attention", "mamba"],
        "mamba_num_heads": 4,
        "mamba_head_dim": 8,
        "n_groups": 2,
        "ssm_state_size": 8,
        "chunk_size": 8,
        "time_step_min": 0.3,  # a limit that is reached
        "moe_shared_expert_intermediate_size": 16,
    },
    "mamba2": {
        "num_heads": 4,
        "head_dim": 16,
        "expand": 2,
        "n_groups": 2,
        "state_size": 8,
        "chunk_size": 8,
        "time_step_limit": (0.4, 2.0),
    },
}
NUM_MIXERS = {"granitemoehybrid": 1, "bamba": 1, "nemotron_h": 2, "mamba2": 2}


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    register_attention("shoal", "sdpa")
    monkeypatch.setattr(ssd_chunked, "CHUNK_TOKENS", 4)
    monkeypatch.setattr(ssd_chunked, "BLOCK_TOKENS", 8)


def untouched(family: str, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    return tiny_model(family, dtype, **FAMILIES[family])


def substituted(family: str, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    model = untouched(family, dtype)
    assert substitute_mamba(model) == NUM_MIXERS[family]
    return model


@functools.cache
def expected(family: str) -> dict[str, Tensor]:
    """transformers' own path, one document at a time, in float64."""
    with InDouble():
        return one_by_one(untouched(family))


@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_equals_one_by_one(family: str, padding: int) -> None:
    with InDouble():
        model = substituted(family)
        packable(model)
        assert worst(packed(model, **packed_inputs(padding=padding)), expected(family)) <= 1e-10
        assert worst(one_by_one(substituted(family)), expected(family)) <= 1e-10


@pytest.mark.parametrize("family", ["bamba", "nemotron_h", "mamba2"])
def test_without_borders_documents_are_told_apart_by_their_positions(family: str) -> None:
    with InDouble():
        ours = packed(substituted(family), cu_seq_lens_q=None, cu_seq_lens_k=None)
        assert worst(ours, expected(family)) <= 1e-10


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_own_path_mixes_documents(family: str) -> None:
    """What is replaced: with the same arguments it is wrong without an error."""
    with InDouble():
        assert worst(packed(untouched(family)), expected(family)) > 1e-3


@pytest.mark.parametrize("fault", ["state", "convolution"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_missing_reset_is_seen(family: str, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if fault == "state":
        right = ssd_chunked._masks
        monkeypatch.setattr(ssd_chunked, "_masks", lambda span, size, _, like: right(span, size, None, like))
    else:
        monkeypatch.setattr(ssd_convolution, "_masked", lambda x, *_: x)
    with InDouble():
        assert worst(packed(substituted(family)), expected(family)) > 1e-3


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_right_padded_rows(family: str, masked: bool) -> None:
    """One document a row; what stands in the padding changes nothing, with transformers' mask or without."""
    longest, ends = max(LENS), running_sum(LENS).tolist()
    ids = torch.full((len(LENS), longest), 5)
    for row, (a, b) in enumerate(zip(ends, ends[1:], strict=False)):
        ids[row, : b - a] = tokens(sum(LENS))[0, a:b]
    mask = torch.arange(longest) < torch.tensor(LENS)[:, None]
    with InDouble():
        model = substituted(family)
        arguments = {"attention_mask": mask.long()} if masked else {}
        logits = model(input_ids=ids, use_cache=False, **arguments).logits[mask][None]
        assert worst(backward(model, logits), expected(family)) <= 1e-10


@pytest.mark.parametrize("loss", ["chunked", "full"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_trainable_module_packs_them(family: str, loss: Any) -> None:
    """Loss and every gradient of a pack, padding included, as of its documents as rows."""
    with InDouble():
        alone, together = (CausalLM(substituted(family), loss=loss) for _ in range(2))
        together.llm.set_attn_implementation("shoal")
        pack = packed_inputs(padding=3)
        ids, ends = pack["input_ids"], running_sum(LENS).tolist()
        supervised = torch.ones_like(ids, dtype=torch.bool)
        supervised[:, [*ends[:-1], *range(ends[-1], ids.shape[1])]] = False
        total = together(
            {
                "input_ids": ids,
                "loss_mask": supervised,
                "position_ids": pack["position_ids"],
                "cu_seqlens": pack["cu_seq_lens_q"],
                "max_seqlen": max(LENS),
            }
        )["loss_sum"]
        total.backward()
        rows = [
            alone({"input_ids": ids[:, a:b], "loss_mask": supervised[:, a:b]})["loss_sum"]
            for a, b in zip(ends, ends[1:], strict=False)
        ]
        torch.stack(rows).sum().backward()
        torch.testing.assert_close(total, torch.stack(rows).sum(), rtol=1e-10, atol=1e-10)
        ours, theirs = ({n: p.grad for n, p in module.named_parameters()} for module in (together, alone))
        assert not [n for n, g in ours.items() if g is None and theirs[n] is not None]
        assert worst(*({n: g for n, g in x.items() if g is not None} for x in (ours, theirs))) <= 1e-10  # type: ignore[arg-type]


@pytest.mark.parametrize("family", FAMILIES)
def test_recomputed_layers(family: str) -> None:
    model, kept = substituted(family, torch.float32), substituted(family, torch.float32)
    checkpoint_activations(model)
    assert worst(packed(model), packed(kept)) <= 1e-6


@pytest.mark.parametrize("family", ["bamba", "granitemoehybrid"])
def test_adapters_of_both_projections(family: str) -> None:
    """Adapters are modules that the layer calls: with B = 0 nothing changes, and both train."""
    with InDouble():
        model = substituted(family)
        add_lora(model, {"r": 2, "target_modules": ["in_proj", "out_proj"]})
        for name, parameter in model.named_parameters():
            if ".lora_" in name:
                module, _, leaf = name.rpartition(".")
                value = torch.full(parameter.shape, 0.0 if "lora_B" in name else 0.1, dtype=torch.float64)
                setattr(model.get_submodule(module), leaf, nn.Parameter(value))
        ours = packed(model)
        torch.testing.assert_close(ours["logits"], expected(family)["logits"], rtol=1e-10, atol=1e-10)
        trained = [name for name in ours if "lora_B" in name]
        assert len(trained) == 2 and all(ours[name].any() for name in trained)


@pytest.mark.parametrize("family", FAMILIES)
def test_names_classes_and_generation_stay(family: str) -> None:
    model, plain = substituted(family, torch.float32).eval(), untouched(family, torch.float32).eval()
    assert list(model.state_dict()) == list(plain.state_dict())
    assert [type(m) for m in model.modules()] == [type(m) for m in plain.modules()]
    arguments: dict[str, Any] = {"input_ids": tokens(5), "max_new_tokens": 4, "do_sample": False}
    assert torch.equal(model.generate(**arguments), plain.generate(**arguments))


def test_copies_compute_with_their_own_weights() -> None:
    model = substituted("mamba2", torch.float32)
    changed = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in changed.parameters():
            parameter.zero_()
    assert not changed(input_ids=tokens(5), use_cache=False).logits.any()
    assert model(input_ids=tokens(5), use_cache=False).logits.any()


def test_compiled_layers() -> None:
    model = substituted("bamba", torch.float32)
    reference = one_by_one(model)
    model.model.layers[0].compile(backend="eager")
    assert worst(packed(model), reference) <= 1e-5


def test_on_meta() -> None:
    with parameters_on_meta():
        model = untouched("nemotron_h", torch.float32)
    assert substitute_mamba(model) == 2 and all(p.is_meta for p in model.parameters())


@pytest.mark.parametrize("family", FAMILIES)
def test_what_would_be_wrong_is_refused(family: str) -> None:
    with pytest.raises(ValueError, match=f"model type {family} cannot be packed: .*conv1d is a convolution"):
        packable(untouched(family, torch.float32))
    model = substituted(family, torch.float32)
    with pytest.raises(ValueError, match="packed documents with a cache; give use_cache=False"):
        packed(model, use_cache=True)
    with pytest.raises(ValueError, match="cu_seq_lens_q with 2 rows"):
        packed(model, input_ids=tokens(58).view(2, 29), position_ids=None)


def test_other_models_are_left_alone() -> None:
    assert substitute_mamba(tiny_model("llama", torch.float32)) == 0
    assert substitute_mamba(tiny_model("jamba", torch.float32)) == 0
