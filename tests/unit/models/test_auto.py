"""The Python interface: a hand-written loop on shards takes the steps that one process takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM as TransformersModel
from transformers import GenerationConfig, PreTrainedModel

import shoal
from shoal.config.llm import CompileConfig
from shoal.config.schema import DDPConfig, FSDP2Config
from shoal.parallel.managers import DDPManager, FSDP2Manager
from shoal.parallel.setup import DistributedSetup
from tests.families import VOCAB, tiny_config, tiny_lm
from tests.unit.models.test_load import setup_of, tensors_of
from tests.zygote import RankRunner

NUM_STEPS, NUM_MICRO_BATCHES = 2, 4
LORA = {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "down_proj"]}


def micro_batches(step: int) -> list[tuple[Tensor, Tensor]]:
    """(ids, labels), each [B, S], of a step: different shapes, unequally many labels."""
    generator = torch.Generator().manual_seed(step)
    batches = []
    for index in range(NUM_MICRO_BATCHES):
        ids = torch.randint(0, VOCAB, (1 + index % 3, 6 + 2 * index), generator=generator)
        labels = ids.clone()
        labels[:, : 2 + index] = -100
        batches.append((ids, labels))
    return batches


def summed_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100, reduction="sum"
    )


def train(model: PreTrainedModel, rank: int, world: int) -> list[float]:
    """Losses and gradient norms of the loop that a user writes."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    numbers = []
    for step in range(NUM_STEPS):
        mine = micro_batches(step)[rank::world]
        num_tokens = torch.tensor(sum(int((labels[:, 1:] != -100).sum()) for _, labels in mine))
        if dist.is_initialized():
            dist.all_reduce(num_tokens)
        total = torch.zeros((), dtype=torch.float64)
        for index, (ids, labels) in enumerate(mine):
            with shoal.gradient_sync(model, last=index == len(mine) - 1):
                loss = summed_loss(model(input_ids=ids, use_cache=False).logits, labels) / num_tokens
                loss.backward()
            total += loss.detach()
        norm: Any = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        if dist.is_initialized():
            dist.all_reduce(total)
        numbers += [float(total), float(norm.full_tensor() if isinstance(norm, DTensor) else norm)]
    return numbers


def train_on_rank(
    rank: int, world: int, strategy: str, folder: str, options: dict[str, Any]
) -> tuple[list[float], dict[str, Tensor]]:
    model = shoal.AutoModelForCausalLM.from_pretrained(
        folder, distributed_setup=setup_of(strategy, world), dtype="float64", seed=5, **options
    )
    numbers = train(model, rank, world)
    return numbers, tensors_of(model)


@pytest.mark.parametrize("options", [{}, {"peft_config": LORA}, {"freeze": [r"^model\.embed.+"]}])
def test_a_hand_written_loop_is_layout_independent(
    ranks: RankRunner, tmp_path: Path, options: dict[str, Any]
) -> None:
    tiny_lm("qwen3").save_pretrained(tmp_path)
    expected, weights = train_on_rank(0, 1, "plain", str(tmp_path), options)
    for strategy, world in (("ddp", 2), ("fsdp2", 2), ("hsdp", 4), ("fsdp2", 4)):
        numbers, actual = ranks(train_on_rank, world, strategy, str(tmp_path), options)[-1]
        assert numbers == pytest.approx(expected, rel=1e-10), (strategy, world)
        for name, weight in weights.items():
            torch.testing.assert_close(actual[name], weight, rtol=1e-9, atol=1e-9, msg=f"{strategy}: {name}")


def test_the_loop_on_one_process_is_plain_transformers(tmp_path: Path) -> None:
    tiny_lm("qwen3").save_pretrained(tmp_path)
    ours = train_on_rank(0, 1, "plain", str(tmp_path), {})[0]
    model = TransformersModel.from_pretrained(tmp_path, dtype=torch.float64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(NUM_STEPS):
        ids_and_labels = micro_batches(step)
        num_tokens = sum(int((labels[:, 1:] != -100).sum()) for _, labels in ids_and_labels)
        loss = sum(summed_loss(model(input_ids=i).logits, t) for i, t in ids_and_labels) / num_tokens
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        assert ours[2 * step : 2 * step + 2] == pytest.approx([float(loss.detach()), float(norm)], rel=1e-10)


def average_gradients(rank: int, world: int, strategy: str, folder: str) -> list[float]:
    import shoal.parallel.ddp as ddp
    import shoal.parallel.fsdp2 as fsdp2

    fsdp2._sum_gradients = lambda module, mesh: None  # type: ignore[assignment]
    ddp.sum_gradients_hook = lambda group, bucket: (  # type: ignore[assignment]
        dist.all_reduce(bucket.buffer().div_(world), async_op=True)
        .get_future()
        .then(lambda done: done.value()[0])
    )
    return train_on_rank(rank, world, strategy, folder, {})[0]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_averaged_gradients_would_be_noticed(ranks: RankRunner, tmp_path: Path, strategy: str) -> None:
    tiny_lm("qwen3").save_pretrained(tmp_path)
    expected = train_on_rank(0, 1, "plain", str(tmp_path), {})[0]
    numbers = ranks(average_gradients, 2, strategy, str(tmp_path))[0]
    assert numbers[1] == pytest.approx(expected[1] / 2, rel=1e-6)


def generate_on_rank(rank: int, world: int, strategy: str, folder: str) -> Tensor:
    model = shoal.AutoModelForCausalLM.from_pretrained(folder, distributed_setup=setup_of(strategy, world))
    model.eval()
    assert model.generation_config.max_new_tokens == 7
    generated = model.generate(torch.tensor([[3, 4, 5 + rank]]), do_sample=False)
    assert isinstance(generated, Tensor)
    train(model.train(), rank, world)  # generating leaves nothing behind that training would stumble over
    return generated


def test_generate_works_on_every_layout(ranks: RankRunner, tmp_path: Path) -> None:
    model = tiny_lm("llama")
    model.save_pretrained(tmp_path)
    GenerationConfig(max_new_tokens=7, pad_token_id=0).save_pretrained(tmp_path)
    prompts = [torch.tensor([[3, 4, 5 + rank]]) for rank in range(2)]
    expected = [model.generate(p, do_sample=False, max_new_tokens=7, pad_token_id=0) for p in prompts]
    for strategy in ("ddp", "fsdp2"):
        for actual, wanted in zip(ranks(generate_on_rank, 2, strategy, str(tmp_path)), expected, strict=True):
            assert torch.equal(actual, wanted)


def build_on_rank(rank: int, world: int, strategy: str) -> dict[str, Tensor]:
    torch.manual_seed(rank)
    config = tiny_config("qwen3")
    return tensors_of(
        shoal.AutoModelForCausalLM.from_config(config, distributed_setup=setup_of(strategy, world), seed=9)
    )


def test_random_weights_do_not_depend_on_the_layout(ranks: RankRunner) -> None:
    expected = build_on_rank(0, 1, "plain")
    for strategy, world in (("fsdp2", 2), ("ddp", 2)):
        actual = ranks(build_on_rank, world, strategy)[1]
        assert all(torch.equal(actual[name], expected[name]) for name in expected)


def test_a_configuration_may_be_its_fields_or_a_folder(tmp_path: Path) -> None:
    tiny_config("llama").save_pretrained(tmp_path)
    fields = {**tiny_config("llama").to_dict(), "num_hidden_layers": 1}
    assert len(list(shoal.AutoModelForCausalLM.from_config(fields).model.layers)) == 1
    assert len(list(shoal.AutoModelForCausalLM.from_config(tmp_path).model.layers)) == 2


def half_precision_on_rank(rank: int, world: int, folder: str) -> tuple[set[str], set[str], str]:
    model = shoal.AutoModelForCausalLM.from_pretrained(
        folder, distributed_setup=DistributedSetup.build("fsdp2"), torch_dtype="bfloat16"
    )
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    reduced = {str(unit._get_fsdp_state()._mp_policy.reduce_dtype) for unit in units}
    logits = model(input_ids=torch.tensor([[1, 2, 3]])).logits
    return {str(p.dtype) for p in model.parameters()}, reduced, str(logits.dtype)


def test_half_precision_weights_reduce_in_float32(ranks: RankRunner, tmp_path: Path) -> None:
    tiny_lm("llama").save_pretrained(tmp_path)
    stored, reduced, logits = ranks(half_precision_on_rank, 2, str(tmp_path))[0]
    assert (stored, reduced, logits) == ({"torch.bfloat16"}, {"torch.float32"}, "torch.bfloat16")


def test_adapters_may_be_a_lora_config(tmp_path: Path) -> None:
    tiny_lm("llama").save_pretrained(tmp_path)
    config = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    model = shoal.AutoModelForCausalLM.from_pretrained(tmp_path, peft_config=config)
    trainable = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trainable and all(".lora_" in name for name in trainable)


def test_settings_reach_the_model(tmp_path: Path) -> None:
    tiny_lm("llama", dtype=torch.bfloat16).save_pretrained(tmp_path)
    model = shoal.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype="auto", attn_implementation="eager", attention_dropout=0.25
    )
    assert model.dtype == torch.bfloat16 and model.training
    assert model.config._attn_implementation == "eager" and model.config.attention_dropout == 0.25
    packed = shoal.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="shoal")
    assert packed.dtype == torch.float32
    assert packed(input_ids=torch.tensor([[1, 2]])).logits.shape == (1, 2, VOCAB)
    compiled = shoal.AutoModelForCausalLM.from_pretrained(
        tmp_path, compile_config=CompileConfig(enabled=True, backend="aot_eager")
    )
    assert [name for name, _ in compiled.named_parameters()] == [n for n, _ in packed.named_parameters()]


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"dtype": "float16"}, ValueError, "dtype = 'float16'.*repair: dtype='bfloat16'"),
        ({"dtype": "float32", "torch_dtype": "float32"}, ValueError, "one of them"),
        ({"use_liger_kernel": True}, TypeError, "unknown keywords use_liger_kernel"),
        ({"distributed_setup": "fsdp2"}, TypeError, "a DistributedSetup; repair: DistributedSetup.build"),
        ({"gguf_file": "nothing.gguf"}, ValueError, "nothing.gguf.*no such file"),
        ({"compile_config": CompileConfig(enabled=True, backend="no")}, ValueError, "compile.backend = 'no'"),
    ],
)
def test_what_does_not_fit_is_refused(
    tmp_path: Path, options: dict[str, Any], error: type[Exception], said: str
) -> None:
    tiny_lm("llama").save_pretrained(tmp_path)
    with pytest.raises(error, match=said):
        shoal.AutoModelForCausalLM.from_pretrained(tmp_path, **options)


def test_it_is_no_model_itself() -> None:
    with pytest.raises(ValueError, match="fields with a model_type; repair: model_type='llama'"):
        shoal.AutoModelForCausalLM.from_config({"hidden_size": 8})
    with pytest.raises(TypeError, match="from_pretrained"):
        shoal.AutoModelForCausalLM()
    with pytest.raises(ValueError, match="was not made parallel by Shoal"):
        shoal.gradient_sync(nn.Linear(1, 1))


def managed_on_rank(rank: int, world: int, strategy: str, folder: str) -> list[float]:
    model = TransformersModel.from_pretrained(folder, dtype=torch.float64)
    if strategy == "ddp":
        setup = DistributedSetup.build("ddp")
        DDPManager(DDPConfig(activation_checkpointing=True), setup.mesh_context).parallelize(model)
    else:
        setup = DistributedSetup.build("fsdp2")
        FSDP2Manager(FSDP2Config(activation_checkpointing=True), setup.mesh_context).parallelize(model)
    return train(model, rank, world)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_managers_parallelize_a_model_that_is_there(ranks: RankRunner, tmp_path: Path, strategy: str) -> None:
    tiny_lm("llama").save_pretrained(tmp_path)
    expected = train_on_rank(0, 1, "plain", str(tmp_path), {})[0]
    assert ranks(managed_on_rank, 2, strategy, str(tmp_path))[0] == pytest.approx(expected, rel=1e-10)
