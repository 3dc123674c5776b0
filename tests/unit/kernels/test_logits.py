"""What `logit_transforms` reads is what the models of transformers do to their logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from shoal.kernels.logits import linear_head, logit_transforms
from shoal.kernels.loss import token_losses
from shoal.kernels.packable import PACKABLE
from tests.unit.kernels.families import VOCAB, tiny_model

TRANSFORMING: dict[str, dict[str, Any]] = {
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
    "minicpm3": {"dim_model_base": 8},
}


REFUSED = {"dory": "DoryLMHead and no plain", "llama4_text": "does not name its backbone"}


@pytest.mark.parametrize("family", sorted(PACKABLE))
def test_the_loss_from_hidden_states_is_that_of_the_models_logits(family: str) -> None:
    model = tiny_model(family, torch.float32, **TRANSFORMING.get(family, {})).eval()
    if family in REFUSED:
        with pytest.raises(ValueError, match=REFUSED[family]):
            linear_head(model)
        return
    ids = torch.randint(0, VOCAB, (2, 9), generator=torch.Generator().manual_seed(1))
    labels = ids.roll(-1, 1).flatten()
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits.flatten(0, 1).float()
        hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state.flatten(0, 1)
        head = linear_head(model)
        loss_sum, num_correct = token_losses(
            hidden, head.weight, labels, bias=head.bias, **logit_transforms(model.config)
        )
        untransformed, _ = token_losses(hidden, head.weight, labels, bias=head.bias)
    expected = torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
    torch.testing.assert_close(loss_sum, expected, rtol=1e-5, atol=0.0)
    assert num_correct == (logits.argmax(-1) == labels).sum()
    if family in TRANSFORMING:
        assert abs(untransformed - expected) > 1e-3 * expected, "the transform makes no difference here"


def test_a_head_behind_other_layers_is_refused() -> None:
    model = tiny_model("modernbert-decoder", torch.float32, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    with pytest.raises(
        ValueError, match="ModernBertDecoderForCausalLM has lm_head besides its backbone and its head"
    ):
        linear_head(model)


def test_reads_both_arguments_from_the_text_part_of_a_composite_configuration() -> None:
    composite = CONFIG_MAPPING["gemma3"](text_config={"final_logit_softcapping": 5.0})
    assert logit_transforms(composite) == {"softcap": 5.0}
    assert logit_transforms(CONFIG_MAPPING["granite"](logits_scaling=8.0)) == {"logit_scale": 0.125}
    assert logit_transforms(LlamaConfig()) == {}


@pytest.mark.parametrize(
    ("model_type", "attribute"),
    [("llama", "logit_scale"), ("llama", "logits_scaling"), ("qwen3", "final_logit_softcapping")],
)
def test_refuses_a_transform_it_does_not_know_for_the_family(model_type: str, attribute: str) -> None:
    config = CONFIG_MAPPING[model_type](**{attribute: 30.0})
    with pytest.raises(
        ValueError, match=rf"model type {model_type}: .*not known what .*{attribute}.* does to the logits"
    ):
        logit_transforms(config)
    assert logit_transforms(CONFIG_MAPPING[model_type](**{attribute: 1.0})) == {}
    assert logit_transforms(CONFIG_MAPPING[model_type](**{attribute: None})) == {}
