"""What `logit_transforms` reads is what the models of transformers do to their logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from shoal.kernels.logits import logit_transforms
from shoal.kernels.loss import token_losses

TINY = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "pad_token_id": None,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma2": {"final_logit_softcapping": 2.0},
    "gemma3_text": {"final_logit_softcapping": 2.0},
    "nanochat": {"final_logit_softcapping": 2.0},
    "vaultgemma": {"final_logit_softcapping": 2.0},
    "cohere": {"logit_scale": 0.3},
    "cohere2": {"logit_scale": 0.3},
    "granite": {"logits_scaling": 4.0},
    "granitemoe": {"logits_scaling": 4.0, "num_local_experts": 2},
    "granitemoeshared": {"logits_scaling": 4.0, "num_local_experts": 2},
    "hyperclovax": {"logits_scaling": 4.0},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_loss_from_hidden_states_is_that_of_the_models_logits(family: str) -> None:
    config = CONFIG_MAPPING[family](**TINY, **FAMILIES[family])
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    ids = torch.randint(0, 64, (2, 9), generator=torch.Generator().manual_seed(1))
    labels = ids.roll(-1, 1).flatten()
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits.flatten(0, 1).float()
        hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state.flatten(0, 1)
        head = model.get_output_embeddings().weight
        loss_sum, num_correct = token_losses(hidden, head, labels, **logit_transforms(config))
        untransformed, _ = token_losses(hidden, head, labels)
    expected = torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
    torch.testing.assert_close(loss_sum, expected, rtol=1e-5, atol=0.0)
    assert num_correct == (logits.argmax(-1) == labels).sum()
    if FAMILIES[family]:
        assert abs(untransformed - expected) > 1e-3 * expected, "the transform makes no difference here"


def test_reads_both_arguments_from_the_text_part_of_a_composite_configuration() -> None:
    composite = CONFIG_MAPPING["gemma3"](text_config={**TINY, "final_logit_softcapping": 5.0})
    assert logit_transforms(composite) == {"softcap": 5.0}
    assert logit_transforms(CONFIG_MAPPING["granite"](logits_scaling=8.0)) == {"logit_scale": 0.125}
    assert logit_transforms(LlamaConfig()) == {}


@pytest.mark.parametrize(
    ("model_type", "attribute"),
    [("llama", "logit_scale"), ("llama", "logits_scaling"), ("qwen3", "final_logit_softcapping")],
)
def test_refuses_a_transform_it_does_not_know_for_the_family(model_type: str, attribute: str) -> None:
    config = CONFIG_MAPPING[model_type](**{attribute: 30.0})
    with pytest.raises(ValueError, match=rf"model type {model_type}: .*{attribute}.*own loss"):
        logit_transforms(config)
    assert logit_transforms(CONFIG_MAPPING[model_type](**{attribute: 1.0})) == {}
    assert logit_transforms(CONFIG_MAPPING[model_type](**{attribute: None})) == {}
