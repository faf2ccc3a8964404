"""Buckets hold every tensor once, and shards cover a bucket."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from protocol.records import TensorSpec
from swarm.core.model import LayerShape, ModelShape, TensorUse
from swarm.core.reduction import Bucket, Slot, buckets, shard_bounds

ANY = TensorSpec("float32", (1,))


def shape_of(*layers: tuple[TensorUse, ...]) -> ModelShape:
    made = tuple(LayerShape(f"layer{n}", uses, ANY) for n, uses in enumerate(layers))
    return ModelShape(made, ANY, ANY)


def own(name: str, elements: int) -> TensorUse:
    return TensorUse(name, elements, name)


TIED = shape_of(
    (own("embed", 6), own("position", 2)),
    (own("a", 3),),
    (own("b", 4), TensorUse("b2", 4, "b")),
    (TensorUse("head", 6, "embed"), own("norm", 1)),
)


def test_tied_tensors_have_a_bucket_of_the_stages_that_share_them() -> None:
    assert buckets(TIED, [(0, 2), (2, 4)]) == (
        Bucket(0, (0,), (Slot("position", 0, 2), Slot("a", 2, 5))),
        Bucket(1, (0, 1), (Slot("embed", 0, 6),)),
        Bucket(2, (1,), (Slot("b", 0, 4), Slot("norm", 4, 5))),
    )


def test_one_stage_has_one_bucket() -> None:
    (bucket,) = buckets(TIED, [(0, 4)])
    assert [slot.name for slot in bucket.slots] == ["embed", "position", "a", "b", "norm"]
    assert (bucket.stages, bucket.elements) == ((0,), 16)


@st.composite
def sliced_models(draw: st.DrawFn) -> tuple[ModelShape, list[tuple[int, int]]]:
    owners = {f"t{n}": draw(st.integers(1, 9)) for n in range(draw(st.integers(1, 6)))}
    layers = []
    for number in range(draw(st.integers(1, 6))):
        used = draw(st.lists(st.sampled_from(sorted(owners)), unique=True, max_size=4))
        layers.append(tuple(TensorUse(f"l{number}.{o}", owners[o], o) for o in used))
    cuts = draw(st.sets(st.integers(1, len(layers)), max_size=3)) - {len(layers)}
    return shape_of(*layers), list(itertools.pairwise([0, *sorted(cuts), len(layers)]))


@given(sliced_models())
def test_every_value_is_in_one_bucket_of_exactly_its_users(
    case: tuple[ModelShape, list[tuple[int, int]]],
) -> None:
    shape, stages = case
    made = buckets(shape, stages)
    assert [bucket.index for bucket in made] == list(range(len(made)))
    users: dict[str, set[int]] = {}
    for stage, (first, last) in enumerate(stages):
        for layer in shape.layers[first:last]:
            for use in layer.tensors:
                users.setdefault(use.tied_to, set()).add(stage)
    found = {slot.name: set(bucket.stages) for bucket in made for slot in bucket.slots}
    assert found == users
    assert sum(len(bucket.slots) for bucket in made) == len(users)
    for bucket in made:
        edges = [0, *(slot.stop for slot in bucket.slots)]
        assert [slot.start for slot in bucket.slots] == edges[:-1]
        assert bucket.elements == edges[-1]


@given(st.integers(0, 10_000), st.lists(st.integers(1, 1000), min_size=1, max_size=8))
def test_shards_cover_a_bucket_in_proportion(elements: int, shares: list[int]) -> None:
    bounds = shard_bounds(elements, shares)
    assert len(bounds) == len(shares)
    assert bounds[0][0] == 0 and bounds[-1][1] == elements
    assert all(one[1] == other[0] for one, other in itertools.pairwise(bounds))
    for (start, stop), share in zip(bounds, shares, strict=True):
        assert abs((stop - start) - elements * share / sum(shares)) <= 1
