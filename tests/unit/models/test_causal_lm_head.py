"""The chunked loss is refused for heads that it would replace wrongly."""

import pytest
import torch

from shoal.models.causal_lm import CausalLM
from tests.unit.kernels.families import tiny_model


@pytest.mark.parametrize(
    ("family", "reason"),
    [("dory", "DoryLMHead and no plain linear layer"), ("llama4_text", "does not name its backbone.*")],
)
def test_a_head_that_the_chunked_loss_cannot_replace_is_refused(family: str, reason: str) -> None:
    model = tiny_model(family, torch.float32)
    with pytest.raises(ValueError, match=f"loss_fn.kind = 'chunked': .*{reason}; repair: loss_fn.kind=full"):
        CausalLM(model)
    CausalLM(model, loss="full")
