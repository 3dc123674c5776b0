"""Case 40: a loader state of some ranks only loses or repeats samples when the number of ranks changes."""

from collections import Counter
from itertools import islice

from shoal.data.position import StreamPosition
from shoal.data.stream import build_train_loader
from tests.unit.data.corpus import CharPrompts, Clip, batch_ids, dataset, write_nemo


def take(config, dp_size, position, steps):
    """Runs `steps` on every rank; returns the names seen and the one position all ranks agree on."""
    seen, positions = Counter(), set()
    for dp_rank in range(dp_size):
        loader = build_train_loader(
            config,
            CharPrompts(),
            dp_rank=dp_rank,
            dp_size=dp_size,
            global_micro_batches=4,
            position=StreamPosition.from_dict(position),
        )
        batches = list(islice(loader, steps))
        seen.update(name for batch in batches for names in batch_ids(batch) for name in names)
        positions.add(batches[-1].position)
    (agreed,) = positions
    return seen, agreed.to_dict()


def test_four_then_two_then_four_ranks_see_every_sample_once(tmp_path):
    manifest = write_nemo(tmp_path, [Clip(number, 0.05) for number in range(24)])
    expected = Counter(f"clip{number}.wav" for number in range(24))
    for bucketing in (False, True):
        config = dataset(
            manifest, batch_size=2, shuffle=True, seed=3, use_bucketing=bucketing, bucket_buffer_size=6
        )
        first, position = take(config, 4, StreamPosition().to_dict(), steps=1)
        second, position = take(config, 2, position, steps=1)
        third, position = take(config, 4, position, steps=1)
        assert first + second + third == expected
        assert (position["epoch"], position["consumed"]) == (1, 0)
        again, _ = take(config, 2, position, steps=3)
        assert again == expected
