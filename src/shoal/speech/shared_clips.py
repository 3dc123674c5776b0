"""Speech encoding divided among ranks that have the same clips: each encodes some of them, and all get all."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from shoal.mesh.exchange import gather
from shoal.speech.batch_norm import StepBatchNorm1d
from shoal.speech.perception import AudioPerception


def encode_shared(
    perception: AudioPerception,
    audios: Tensor,
    audio_lens: Tensor,
    seeds: Tensor,
    clip_lens: Tensor,
    group: ProcessGroup,
    silence: Callable[[], Tensor],
) -> Tensor:
    """Embeds a batch of clips, each on one rank of the group. Collective.

    Clips are dealt in descending order of length. An encoder with batch normalisation in training mode runs them all on
    every rank instead, because its numbers depend on which clips it sees together.

    Args:
        perception: The same on every rank.
        audios: [B, T] float32, B at least 1, the same on every rank, as all that follows.
        audio_lens: [B] int64.
        seeds: One per clip, [B] int64.
        clip_lens: Embeddings of each clip, [B] int64, from `perception.output_lengths`.
        group: The ranks that share the work.
        silence: Runs perception on a stand-in and gives a scalar; called on ranks that get no clip, so that all ranks
            gather the same weights.

    Returns:
        Embeddings [B, L, H], arbitrary after each clip's end. Each rank uses them for its own tokens only: the gradient
        of a clip is summed over the ranks and goes to the one that encoded it.
    """
    if any(isinstance(part, StepBatchNorm1d) and part.training for part in perception.modules()):
        whole: Tensor = perception(audios, audio_lens, seeds)[0]
        return whole
    size, num_clips, longest = group.size(), len(audio_lens), max(1, int(clip_lens.max()))
    order = audio_lens.argsort(descending=True, stable=True)
    mine = order[group.rank() :: size]
    if len(mine):
        samples = int(audio_lens[mine].max())
        clips, _ = perception(audios[mine, :samples], audio_lens[mine], seeds[mine])
    else:
        clips = silence().expand(0, 1, perception.proj.out_features)
    # The same shape on every rank.
    rows = -(-num_clips // size)
    clips = clips[:, :longest]
    room = F.pad(clips, (0, 0, 0, longest - clips.shape[1], 0, rows - len(clips)))
    joined = gather(room, group)
    places = torch.empty_like(order)
    dealt = torch.arange(num_clips, device=order.device)
    places[order] = dealt % size * rows + dealt // size
    return joined.index_select(0, places)
