"""Generation with a model sharded by FSDP2 over two ranks that have different prompts."""

from typing import Any

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from shoal.speech.salm import SALM
from tests.tiny import ragged_micro_batches, tiny_salm
from tests.zygote import RankRunner

OPTIONS: dict[str, Any] = {"max_new_tokens": 7, "pad_token_id": 3}


def prompts_of(rank: int) -> dict[str, Any]:
    return ragged_micro_batches(3, seed=8, without_audio=(1,))[rank]


def shard(model: SALM, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (world_size,))
    layers = [*model.perception.encoder.layers, model.llm.model.embed_tokens, *model.llm.model.layers]
    for unit in [*layers, model]:
        fully_shard(unit, mesh=mesh)


def generate_sharded(rank: int, world_size: int, eos: int) -> tuple[list[list[int]], bool]:
    model = tiny_salm().eval()
    shard(model, world_size)
    tokens = model.generate(prompts_of(rank), eos_token_id=eos, **OPTIONS)
    trained = model.train()(prompts_of(rank))["loss_sum"]
    trained.backward()  # the model still trains after having generated
    return tokens.tolist(), all(p.grad is not None for p in model.parameters() if p.requires_grad)


def test_each_rank_gets_the_tokens_of_the_whole_model(ranks: RankRunner) -> None:
    """Rank 0 ends after its second token; it must stay in the collectives until rank 1 is done."""
    model = tiny_salm().eval()
    eos = int(model.generate(prompts_of(0), eos_token_id=64, **OPTIONS)[0, 1])
    expected = [model.generate(prompts_of(rank), eos_token_id=eos, **OPTIONS).tolist() for rank in (0, 1)]
    assert len(expected[0][0]) == 2 and len(expected[1][0]) == 7
    for rank, (tokens, complete) in enumerate(ranks(generate_sharded, 2, eos)):
        assert [row[: len(want)] for row, want in zip(tokens, expected[rank], strict=True)] == expected[rank]
        assert all(token == 3 for row in tokens for token in row[len(expected[rank][0]) :])
        assert complete
