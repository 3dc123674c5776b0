"""Which families of models keep packed documents apart, by `model_type`; what the code was compared for, as data."""

from __future__ import annotations

PACKABLE = frozenset(
    """
    afmoe apertus arcee aria_text beam bitnet codegen cohere cohere2 cohere2_moe cwm deepseek_v2 deepseek_v3
    diffllama dory dots1 ernie4_5 ernie4_5_moe exaone exaone4 exaone_moe flex_olmo flint gemma gemma2 gemma3_text
    gemma4_text glm glm4 glm4_moe glm4_moe_lite gpt2 gpt_bigcode gpt_neox gpt_oss gptj granite granite_swa
    granitemoe granitemoe_swa granitemoehybrid granitemoeshared helium hrm_text hunyuan_v1_dense hunyuan_v1_moe
    hy_v3 hyperclovax internlm3 iquestcoder jais2 jetmoe kolibri1 laguna llama llama4_text mellum mimo_v2_flash
    minicpm3 minimax_m2 ministral ministral3 mistral mixtral nanochat nemotron olmo olmo2 olmo3 olmoe persimmon
    phi phi3 qwen2 qwen2_moe qwen3 qwen3_moe sarvam_moe seed_oss smollm3 solar_open stablelm starcoder2 vaultgemma
    youtu
    """.split()  # noqa: SIM905
)
"""Values of `config.model_type`. The tests compare loss and every gradient for each of them, in float64."""

HYBRIDS = frozenset({"bamba", "mamba2", "nemotron_h"})
"""The same, once their Mamba-2 layers have our scan; see `shoal.models.mamba`."""

DEAF = frozenset({"nemotron", "stablelm"})
"""Their layers hand no keyword arguments down to attention, which context parallelism needs."""
