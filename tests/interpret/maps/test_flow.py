"""Norm-weighted attention and rollout equal loops over single numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from clearhead.base.errors import InputError
from clearhead.interpret.maps.flow import norm_weighted, rollout
from clearhead.interpret.maps.hook_points import capture
from tests.interpret.maps.cases import CASES, Run, run


def weights_of(whole_run: Run) -> dict[tuple[str, int], np.ndarray]:
    """Return the weights [heads, queries, keys] of each stack and layer, captured from the eager kernel."""
    with torch.no_grad(), capture(whole_run.module, "**.weights") as seen:
        whole_run.module(whole_run.streams.source, whole_run.streams.target)
    weights = {}
    for address, entries in seen.items():
        source = whole_run.module.get_submodule(address.removesuffix(".weights")).spec.source
        for entry in entries:
            weights[f"{address.partition('.')[0]}.{source}", entry.depth] = entry.tensor[0].double().numpy()
    return weights


@pytest.mark.parametrize("name", CASES)
def test_a_weight_is_multiplied_by_the_length_of_what_it_moves(name: str) -> None:
    whole_run = run(name)
    weights = weights_of(whole_run)
    for entry in whole_run.records:
        group = entry.attention.spec.num_heads // entry.attention.spec.num_kv_heads
        size, out = entry.attention.spec.head_size, entry.attention.out.weight.detach().double().numpy()
        for head in (0, entry.num_heads - 1):
            values = entry.value_BKSE[0, head // group].double().numpy()
            expected = np.zeros(weights[entry.stack, entry.layer].shape[1:])
            for query, key in np.ndindex(expected.shape):
                alpha = weights[entry.stack, entry.layer][head, query, key]
                moved = alpha * (out[:, head * size : (head + 1) * size] @ values[key])
                expected[query, key] = np.sqrt(np.sum(moved**2))
            measured = norm_weighted(entry, head)
            assert measured.dtype == torch.float32
            np.testing.assert_allclose(measured.numpy(), expected, atol=1e-5 * expected.max())


@pytest.mark.parametrize("name", CASES)
def test_rollout_multiplies_the_layers(name: str) -> None:
    """Reference: one matrix moves the shares of both texts as one stream."""
    whole_run = run(name)
    weights = weights_of(whole_run)
    lengths = {"encoder": whole_run.streams.source.ids.shape[1], "decoder": whole_run.streams.last.ids.shape[1]}
    lengths = lengths if whole_run.streams.target else {whole_run.streams.top: whole_run.streams.last.ids.shape[1]}
    source = lengths.get("encoder", 0) if whole_run.streams.target else 0
    share = np.eye(sum(lengths.values()))  # of each token of both texts, at each position of both
    expected: dict[str, list[np.ndarray]] = {}
    for stack in lengths:
        rows = slice(0, source) if stack == "encoder" and source else slice(source, None)
        for layer in range(len(getattr(whole_run.module, stack).order)):
            for kind, keys in (("self", rows), ("memory", slice(0, source))):
                if (f"{stack}.{kind}", layer) in weights:
                    step = np.eye(len(share))
                    step[rows] *= 0.5
                    step[rows, keys] += 0.5 * weights[f"{stack}.{kind}", layer].mean(0)
                    share = step @ share
            expected.setdefault(f"{stack}.self", []).append(share[rows, rows])
            expected.setdefault(f"{stack}.memory", []).append(share[rows, :source])
    for stack in dict.fromkeys(entry.stack for entry in whole_run.records):
        measured = rollout(whole_run.records, stack)
        assert measured.dtype == torch.float32
        np.testing.assert_allclose(measured.numpy(), np.stack(expected[stack]), atol=1e-6)


def test_the_shares_of_both_texts_sum_to_one() -> None:
    records = run("two stacks").records
    both = torch.cat([rollout(records, "decoder.self"), rollout(records, "decoder.memory")], dim=-1)
    torch.testing.assert_close(both.sum(-1), torch.ones(both.shape[:2]))


def test_an_attention_that_is_not_there_is_refused() -> None:
    with pytest.raises(InputError, match=r"no attention 'decoder\.memory'; it has decoder\.self"):
        rollout(run("parallel branches").records, "decoder.memory")
