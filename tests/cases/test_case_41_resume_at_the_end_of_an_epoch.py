"""Case 41: a checkpoint at the last step of an epoch resumes into an empty epoch, in another order."""

from dataclasses import replace
from itertools import islice

import pytest

from shoal.data.position import StreamPosition
from shoal.data.stream import build_train_loader
from tests.unit.data.corpus import CharPrompts, Clip, batch_ids, dataset, write_nemo


@pytest.mark.parametrize("steps_per_epoch", [None, 6])
def test_the_resumed_run_does_the_next_epoch_in_its_own_order(tmp_path, steps_per_epoch):
    config = dataset(write_nemo(tmp_path, [Clip(n, 0.05) for n in range(12)]), batch_size=2, shuffle=True)

    def loader(position):
        return build_train_loader(
            config,
            CharPrompts(),
            dp_rank=0,
            dp_size=1,
            global_micro_batches=1,
            position=position,
            steps_per_epoch=steps_per_epoch,
        )

    uninterrupted = loader(StreamPosition())
    first = list(uninterrupted)
    second = [batch_ids(batch) for batch in uninterrupted]
    assert len(first) == len(second) == 6
    assert [batch_ids(batch) for batch in first] != second

    saved = first[-1].position
    # The same place, written by a run that counts steps without knowing that the epoch has ended.
    uncounted = replace(first[-2].position, consumed=12)
    for position in (saved, uncounted):
        assert [batch_ids(batch) for batch in loader(position)] == second
    left = [batch_ids(batch) for batch in islice(loader(first[3].position), 2)]
    assert left == [batch_ids(batch) for batch in first[4:]]
