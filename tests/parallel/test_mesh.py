"""Shares of a step's rows and directions: who evaluates what, and what the ranks compare."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch
from several_processes import padded, texts
from tiny_texts import passes_of
from transformers.utils import logging

from hf_dpzero.batches.logical_batch import Rows, StepBatches, fingerprint
from hf_dpzero.batches.placement import Placement
from hf_dpzero.batches.shapes import PassShapes
from hf_dpzero.checks.processes import checksum
from hf_dpzero.parallel import collectives, mesh
from hf_dpzero.parallel.collectives import RankError, differing
from hf_dpzero.parallel.mesh import ProcessMesh, choose_mesh, direction_shares
from hf_dpzero.privacy.mechanisms import ScalarMechanism
from hf_dpzero.privacy.plan import PrivacyPlan
from hf_dpzero.privacy.sampling import FullBatchSampler
from hf_dpzero.settings.nested import Performance


@pytest.fixture
def shapes() -> PassShapes:
    return PassShapes(Rows(texts(), padded).collate_each, passes_of(4))


@pytest.mark.parametrize("shares", [1, 2, 3, 7])
def test_shares_are_the_microbatches_of_one_process(shapes, shares):
    """Each microbatch goes to one share, with the very tensors that one process would have."""
    indices = list(range(3, 40))
    whole = {tuple(m.places): m for m in shapes.microbatches(indices)}
    found = {}
    for share in range(shares):
        made, told = shapes.dealt(indices, share, shares)
        assert [place for m in made for place in m.places] == told[share]
        found.update({tuple(m.places): m for m in made})
    assert found.keys() == whole.keys() and len(whole) > 7
    for places, one in whole.items():
        assert all(torch.equal(one[name], found[places][name]) for name in one)
    assert sorted(itertools.chain(*told)) == list(range(37))
    assert shapes.dealt([], shares - 1, shares) == ([], [[]] * shares)


def cut_at_random(rows):
    keep = int(torch.randint(2, 16, (1,)))
    return padded([{**row, "input_ids": row["input_ids"][:keep]} for row in rows])


def test_processes_that_share_directions_draw_the_same_widths():
    """They hold the same rows: a collator that draws gives both the same, and other steps others."""
    rows, key = Rows(texts(), cut_at_random), b"k" * 32
    sampler = FullBatchSampler(num_examples=60, expected_batch_size=60)
    mechanism = ScalarMechanism(clip=1.0, noise_multiplier=1.0, expected_batch_size=60)
    plan = PrivacyPlan(sampler=sampler, mechanism=mechanism, steps=2)
    steps = StepBatches(rows, plan, key, 4, shapes=PassShapes(rows.collate_each, passes_of(4)))
    before = torch.get_rng_state()
    one, other, later = steps[0], steps[0], steps[1]
    assert one["batch_digest"] == other["batch_digest"] and torch.equal(
        before, torch.get_rng_state()
    )
    for mine, theirs in zip(one["microbatches"], other["microbatches"], strict=True):
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    shapes = [[m["input_ids"].tolist() for m in step["microbatches"]] for step in (one, later)]
    assert shapes[0] != shapes[1]


@pytest.mark.parametrize(("total", "parts"), [(4, 2), (5, 4), (3, 3), (7, 2)])
def test_every_direction_is_evaluated_by_one_part(total, parts):
    own = [list(ProcessMesh(rank, 2, parts).own(range(total))) for rank in range(2 * parts)]
    assert list(itertools.chain(*own[:parts])) == list(range(total)) and own[:parts] == own[parts:]
    assert min(map(len, own)) >= 1
    assert [ProcessMesh(rank, 2, parts).counts for rank in range(2 * parts)] == 2 * (
        [True] + [False] * (parts - 1)
    )


def test_gathered_columns_stand_in_order(monkeypatch):
    """Five directions of four parts: blocks are padded to the widest, and the padding is dropped."""
    plus = torch.arange(15.0).reshape(3, 5)
    splits = [ProcessMesh(rank, 1, 4) for rank in range(4)]
    blocks = []

    def keep(block, group):
        blocks.append(block)
        return blocks if len(blocks) == 4 else [block] * 4

    monkeypatch.setattr(mesh, "gather_blocks", keep)
    monkeypatch.setattr(ProcessMesh, "_group", None)
    for one in splits:
        columns = list(one.own(range(5)))
        whole = one.gathered(plus[:, columns], -plus[:, columns], 5)
    assert torch.equal(whole[0], plus) and torch.equal(whole[1], -plus)
    assert {block.shape for block in blocks} == {(2, 3, 2)}


def test_directions_are_split_where_rows_do_not_fill_the_processes():
    """One microbatch cannot be shared by two processes; a hundred can."""

    one = Placement(8.0, (12,), {8: 1.0}, 40.0).busiest
    many = Placement(800.0, (8,), {8: 1.0}, 40.0).busiest
    assert one(2) > 0.85 * one(1) and many(2) < 0.52 * many(1)
    assert direction_shares(2, 8, one) == 2 and direction_shares(2, 8, many) == 1
    assert direction_shares(2, 1, one) == 1 and direction_shares(2, 8, one, may=False) == 1
    assert direction_shares(4, 2, one) == 2  # a mesh: no more shares than directions
    assert direction_shares(3, 2, one) == 1  # two do not divide three


@pytest.mark.parametrize(("kind", "copies"), [("central", 16), ("forward", 9)])
def test_directions_that_may_go_through_one_pass_are_not_shared(monkeypatch, kind, copies):
    monkeypatch.setattr(mesh, "active", lambda: True)
    args = SimpleNamespace(
        performance=Performance(), world_size=2, num_directions=8, first_order=False,
        clipping="fixed", method="dpzero", differences=kind, process_index=0, unit_column=None,
    )  # fmt: skip
    size = copies * 6 * 4  # bytes of the weights and biases below
    for limit, shares in ((size, 1), (size - 1, 2)):
        monkeypatch.setattr(mesh, "STACK_BYTES", limit)
        found = choose_mesh(args, torch.nn.Linear(2, 2), lambda rows: 1.0, False)
        assert found.directions == shares
        args.unit_column = "who"  # whose rows the processes of one share might order differently
        assert choose_mesh(args, torch.nn.Linear(2, 2), lambda rows: 1.0, False).directions == 1
        args.unit_column = None


@pytest.mark.parametrize(
    ("asked", "settings", "words"),
    [
        (2, {"world_size": 3}, "divisor of the number of processes"),
        (4, {"world_size": 4}, "at most num_directions"),
        (2, {"first_order": True}, "no directions"),
        (2, {"clipping": "averaged"}, "groups go to processes"),
        (2, {"unit_column": "who"}, "units go to processes whole"),
        (2, {"sharded": True}, "under FSDP"),
    ],
)
def test_meshes_that_do_not_fit_are_refused(asked, settings, words):
    usual = {
        "world_size": 2, "num_directions": 2, "first_order": False, "clipping": "fixed",
        "method": "dpzero", "process_index": 0, "sharded": False, "unit_column": None,
    }  # fmt: skip
    performance = Performance(direction_parallel_size=asked)
    args = SimpleNamespace(performance=performance, **{**usual, **settings})
    with pytest.raises(ValueError, match=words):
        choose_mesh(args, torch.nn.Linear(2, 2), lambda shares: 1.0 / shares, args.sharded)


def test_a_fingerprint_tells_steps_and_shares_apart():
    base = fingerprint(3, [[1, 2], [5]])
    told = ((4, [[1, 2], [5]]), (3, [[1], [2, 5]]), (3, [[1, 2]]))
    others = [fingerprint(*one) for one in told]
    assert base not in others and base == fingerprint(3, [(1, 2), (5,)])


@pytest.mark.parametrize("values", [[5, 7], [0.5], []])
def test_sums_come_with_proof_that_all_agree(values, monkeypatch):
    """Two ranks with the numbers a and b: 2 (a^2 + b^2) = (a + b)^2 only for a = b."""
    other = {"batch_digest": 77}

    def reduced(sent):
        theirs = [*values, other["batch_digest"], other["batch_digest"] ** 2]
        return [type(a)(a + b) for a, b in zip(sent, theirs, strict=True)]

    monkeypatch.setattr(collectives, "active", lambda: True)
    monkeypatch.setattr(collectives.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(collectives, "sum_over_processes", reduced)
    monkeypatch.setattr(collectives, "gather_numbers", lambda own: [own, other["batch_digest"]])
    assert collectives.sum_checked(values, 77 + (5 << 22), "") == [2 * v for v in values]
    other["batch_digest"] = 78
    with pytest.raises(RankError, match="rank 1 differs from rank 0 in the batch"):
        collectives.sum_checked(values, 77, "in the batch")


def test_the_ranks_that_differ_are_those_that_differ_from_most():
    assert differing([1, 2, 1, 3]) == "ranks 1, 3 differ from rank 0"
    assert differing([1, 2, 2, 2]) == "rank 0 differs from rank 1"
    assert differing([1, 2]) == "rank 1 differs from rank 0"


def test_all_that_differs_is_named_with_what_to_do(monkeypatch):
    told = [{"weights": "a", "setting clip": "x"}, {"weights": "b", "setting clip": "y"}]
    monkeypatch.setattr(collectives, "gather_objects", lambda own: told)
    with pytest.raises(RankError, match="nothing was written") as raised:
        collectives.compare(told[0])
    words = str(raised.value)
    assert "load the same checkpoint" in words and "setting clip: give the same" in words
    told[1] = told[0]
    collectives.compare(told[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("size", [1, 3, 8, 1001])
def test_a_checksum_notices_every_bit(dtype, size):
    tensor = torch.linspace(-1, 1, size + 1).to(dtype)[1:]  # a view that is not aligned to 8 bytes
    before = checksum([tensor, torch.ones(2)])
    assert before == checksum([tensor.clone(), torch.ones(2)])
    raw = tensor.view(torch.uint8)
    for place in {0, len(raw) // 2, len(raw) - 1}:
        raw[place] ^= 1
        assert checksum([tensor, torch.ones(2)]) != before
        raw[place] ^= 1
    assert checksum([]) == checksum([])


@pytest.mark.parametrize("known", [1, 3])
def test_another_number_of_processes_than_the_arguments_know_of_is_refused(monkeypatch, known):
    """Two processes that each believe to be alone would add every row up twice."""
    collectives.check_world(SimpleNamespace(world_size=known))  # one process needs no group
    monkeypatch.setattr(collectives, "active", lambda: True)
    monkeypatch.setattr(collectives.dist, "get_world_size", lambda *_: 2)
    with pytest.raises(ValueError, match=f"2 processes were started.*know of {known}.*use_cpu"):
        collectives.check_world(SimpleNamespace(world_size=known))
    collectives.check_world(SimpleNamespace(world_size=2))


@pytest.mark.parametrize(
    ("port", "world", "told"), [("29500", None, 1), (None, None, 0), ("1", "2", 0)]
)
def test_a_launch_of_several_processes_that_starts_one_is_told(
    monkeypatch, caplog, port, world, told
):
    """What `accelerate launch --num_processes 2` leaves behind where it has no configuration file."""
    monkeypatch.setattr(logging.logging.getLogger("transformers"), "propagate", True)
    logging.logging.Logger.warning_once.cache_clear()
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    for name, value in (("MASTER_PORT", port), ("WORLD_SIZE", world)):
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    collectives.check_world(SimpleNamespace(world_size=1))
    assert caplog.text.count("asked for several processes and started this one alone") == told
