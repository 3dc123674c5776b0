"""Plans of tensor parallelism: where they come from, what they refuse, and which gradients they find partial."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from shoal.config import LLMConfig, load_config
from shoal.config.errors import ConfigError
from shoal.config.options import LoadOptions
from shoal.config.schema import FSDP2Config
from shoal.models.lora import add_lora
from shoal.parallel.tensor.apply import _LocalHeads
from shoal.parallel.tensor.blocks import find_blocks
from shoal.parallel.tensor.plan import resolve_plan
from tests.families import tiny_lm


def findings(family: str, tp_size: int, plan: dict[str, str] | None = None, **changes: Any) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        resolve_plan(tiny_lm(family, **changes), tp_size, plan)
    return {finding.rule: str(finding.limit) for finding in caught.value.findings}


@pytest.mark.parametrize(
    ("family", "origin"), [("llama", "transformers"), ("phi3", "family"), ("nemotron-h", "family")]
)
def test_where_a_plan_comes_from(family: str, origin: str) -> None:
    plan = resolve_plan(tiny_lm(family), 2)
    assert plan.origin == origin
    assert plan.head == "lm_head" and plan.embedding is not None
    own = {f"model.layers.*.mlp.{name}_proj": "colwise" for name in ("gate", "up")}
    own["model.layers.*.mlp.down_proj"] = "rowwise"
    if family == "llama":
        explicit = resolve_plan(tiny_lm(family), 2, own)
        assert explicit.origin == "explicit" and explicit.head is None
        assert set(explicit.styles) == {
            f"model.layers.{i}.mlp.{n}_proj" for i in (0, 1) for n in ("gate", "up", "down")
        }


def test_experts_stay_whole() -> None:
    plan = resolve_plan(tiny_lm("qwen3-moe"), 2)
    assert all(".self_attn." in name for name in plan.styles)


def test_a_model_without_a_plan_is_refused_by_name() -> None:
    limit = findings("gpt2", 2)["tp-plan"]
    assert "GPT2LMHeadModel (gpt2)" in limit and "transformers cuts no layer of it" in limit
    assert limit.startswith("1: ")  # no nn.Linear that a plan of one's own could cut


def test_a_plan_that_gathers_attention_is_refused() -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 1, "vocab_size": 64}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("olmo2", intermediate_size=48, **sizes))
    with pytest.raises(ConfigError, match="transformers computes its attention whole on every rank"):
        resolve_plan(model, 2)


def test_sizes_that_do_not_fit_are_all_named() -> None:
    with pytest.raises(ConfigError, match="a divisor of the model's 4 attention heads: 1, 2, 4"):
        resolve_plan(tiny_lm("llama"), 3)
    with pytest.raises(ConfigError) as caught:
        resolve_plan(tiny_lm("qwen3", num_attention_heads=6, num_key_value_heads=3), 4)
    limits = [str(finding.limit) for finding in caught.value.findings]
    assert len(limits) == 2 and "a divisor or a multiple of the model's 3 key-value heads" in limits[1]
    assert "few enough ranks" in findings("llama", 4, vocab_size=5)["tp-fits-model"]


@pytest.mark.parametrize(
    ("plan", "rule", "said"),
    [
        ({"model.layers.*.mlp.up_proj": "diagonal"}, "tp-plan-style", "one of colwise, rowwise"),
        (
            {"model.layers.*.mlp.upproj": "colwise"},
            "tp-plan-pattern",
            "a name of a module of LlamaForCausalLM",
        ),
        (
            {"model.layers.*.mlp.gate_proj": "colwise", "model.layers.*.mlp.up_proj": "colwise"},
            "tp-plan-block",
            "colwise projections and a rowwise one",
        ),
        (
            {"model.layers.*.mlp.down_proj": "rowwise"},
            "tp-plan-block",
            "colwise projections and a rowwise one",
        ),
    ],
)
def test_explicit_plans_that_mean_nothing(plan: dict[str, str], rule: str, said: str) -> None:
    assert said in findings("llama", 2, plan)[rule]


ROWWISE = {"model.layers.*.mlp.down_proj": "rowwise"}


@pytest.mark.parametrize(
    ("family", "plan", "rule", "said"),
    [
        # Columns of all heads beside columns of this rank's: shapes that do not meet in the middle of the forward.
        (
            "llama",
            {"model.layers.*.mlp.up_proj": "colwise"},
            "tp-plan-block",
            "gate_proj, up_proj of a block",
        ),
        ("llama", {"model.layers.*.mlp": "colwise"}, "tp-plan-class", "mlp is a LlamaMLP"),
        ("llama", {"model.norm": "head"}, "tp-plan-class", "an nn.Linear for head"),
        (
            "llama",
            {"model.layers.*.self_attn.q_proj": "per_head"},
            "tp-plan-class",
            "a parameter for per_head",
        ),
        ("gpt-oss", {"model.layers.*.self_attn.sinks": "colwise"}, "tp-plan-class", "sinks is a parameter"),
        # A contiguous half of stacked projections would be other features than the half of each.
        (
            "phi3",
            {"model.layers.*.mlp.gate_up_proj": "colwise"},
            "tp-plan-style",
            "fused_gate_up: model.layers.0",
        ),
        ("qwen3-moe", {"model.layers.*.mlp.gate": "colwise"}, "tp-plan-pattern", "outside of expert layers"),
    ],
)
def test_explicit_plans_that_would_compute_something_else(
    family: str, plan: dict[str, str], rule: str, said: str
) -> None:
    plan = plan if family == "qwen3-moe" else {**plan, **ROWWISE}
    assert said in findings(family, 2, plan)[rule]


def test_like_layers_are_one_finding() -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_plan(tiny_lm("llama"), 2, ROWWISE)
    (finding,) = caught.value.findings
    assert (finding.key, finding.value) == ("tp_plan", "model.layers.*.mlp: rowwise")


def test_a_function_of_the_users_own_makes_a_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_plans.py").write_text("def mine(model):\n    return {'lm_head': 'head'}\n")
    monkeypatch.syspath_prepend(tmp_path)
    written = {
        "model": {"config": {"model_type": "llama"}},
        "dataset": {"type": "text", "path": "x"},
        "distributed": {"tp_size": 2, "tp_plan": "my_plans.mine"},
        "optimizer": {"_target_": "torch.optim.AdamW", "lr": 1e-3},
        "step_scheduler": {"max_steps": 1},
    }
    with pytest.raises(ConfigError, match="--allow-target my_plans.mine"):
        load_config(written, world_size=2)
    config = load_config(written, world_size=2, options=LoadOptions(allow_targets=("my_plans.mine",)))
    assert isinstance(config, LLMConfig) and isinstance(config.distributed.options, FSDP2Config)
    named = config.distributed.options.tp_plan
    assert config.to_dict()["distributed"]["tp_plan"] == "my_plans.mine"
    assert resolve_plan(tiny_lm("llama"), 2, named).head == "lm_head"


def test_a_configuration_that_counts_local_heads_can_be_copied() -> None:
    config = tiny_lm("llama").config
    local = _LocalHeads(config, num_attention_heads=1)
    for other in (local, copy.copy(local), copy.deepcopy(local), pickle.loads(pickle.dumps(local))):
        assert (other.num_attention_heads, other.hidden_size) == (1, config.hidden_size)
        assert not hasattr(other, "absent")


def test_tied_weights_are_cut_together_or_not_at_all() -> None:
    plan = {"lm_head": "colwise_rep"}
    assert "which are tied" in findings("llama-tied", 2, plan)["tp-plan-tied"]
    assert resolve_plan(tiny_lm("llama"), 2, plan).embedding is None


def test_an_adapter_on_the_cut_embedding_is_refused() -> None:
    model = tiny_lm("llama")
    add_lora(model, {"r": 2, "target_modules": ["embed_tokens", "q_proj"]})
    with pytest.raises(ConfigError, match="no adapter on the input embedding"):
        resolve_plan(model, 2)


def partial(model: Any, *, sequence_parallel: bool) -> set[str]:
    blocks = find_blocks(model, resolve_plan(model, 2), sequence_parallel)
    return {name for name, _ in model.named_parameters() if blocks.is_partial(name)}


def test_the_table_of_partial_gradients() -> None:
    def whole(names: set[str]) -> set[str]:
        return {name.removeprefix("model.layers.0.") for name in names if ".0." in name and "norm" in name}

    heads = {"self_attn.q_norm.weight", "self_attn.k_norm.weight"}
    residual = {"input_layernorm.weight", "post_attention_layernorm.weight"}
    model = tiny_lm("qwen3")
    assert whole(partial(model, sequence_parallel=False)) == heads
    assert whole(partial(model, sequence_parallel=True)) == heads | residual
    assert "model.norm.weight" in partial(model, sequence_parallel=True)
    assert "model.norm.weight" not in partial(model, sequence_parallel=False)


def test_what_every_rank_computes_whole_is_not_partial() -> None:
    experts = partial(tiny_lm("qwen3-moe"), sequence_parallel=True)
    assert not any(".mlp." in name for name in experts) and "model.norm.weight" in experts
    mamba = partial(tiny_lm("nemotron-h"), sequence_parallel=True)
    assert not any(".mixer.A_log" in name or ".mixer.in_proj" in name for name in mamba)


def test_sequence_parallelism_refuses_what_it_does_not_know() -> None:
    model: Any = tiny_lm("llama")
    model.model.memory = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match="it is not known what memory of LlamaForCausalLM does"):
        find_blocks(model, resolve_plan(model, 2), True)
    find_blocks(model, resolve_plan(model, 2), False)
