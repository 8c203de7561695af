"""The loader covers its nodes reproducibly; its thread reports errors and ends with the loop."""

from __future__ import annotations

import gc
import signal
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from gnnfleet.errors import ConfigError, InputError
from gnnfleet.graph.datasets import make_dataset
from gnnfleet.graph.graph import Graph
from gnnfleet.graph.sampling.loader import MiniBatch, NeighborLoader
from gnnfleet.graph.sampling.prefetch import prefetch_items
from gnnfleet.graph.store import open_store, save_store
from gnnfleet.ops.gather import is_paged
from gnnfleet.ops.native import num_threads


@pytest.fixture(scope="module")
def graph() -> Graph:
    return make_dataset("communities", nodes=300, mean_degree=8, seed=3)


def same(first: MiniBatch, second: MiniBatch) -> bool:
    assert isinstance(first.x, torch.Tensor) and isinstance(second.x, torch.Tensor)
    assert first.y is not None and second.y is not None and first.key == second.key
    return (
        torch.equal(first.seeds, second.seeds)
        and torch.equal(first.x, second.x)
        and torch.equal(first.y, second.y)
        and all(torch.equal(a.edge_ids, b.edge_ids) for a, b in zip(first.views, second.views, strict=True))
    )


def test_an_epoch_contains_every_node_once(graph: Graph) -> None:
    nodes = graph.single_nodes
    assert nodes.x is not None and nodes.y is not None
    train = nodes.mask("train").nonzero()[:, 0]
    loader = NeighborLoader(graph, [4, 3], batch_size=32, input_nodes="train")
    batches = list(loader)
    assert len(batches) == len(loader)
    assert torch.equal(torch.cat([batch.seeds for batch in batches]).sort().values, train)
    for batch in batches:
        assert isinstance(batch.n_id, torch.Tensor) and isinstance(batch.x, torch.Tensor) and batch.y is not None
        assert torch.equal(batch.n_id[: batch.batch_size], batch.seeds)
        assert torch.equal(batch.x, nodes.x[batch.n_id])
        assert torch.equal(batch.y, nodes.y[batch.seeds])
        assert torch.equal(batch.views[-1].node_ids[: batch.batch_size], batch.seeds)


def test_a_store_read_by_windows_gives_the_same_batches(
    graph: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gnnfleet.ops.gather.WINDOW_BYTES", 4096)
    save_store(graph, tmp_path / "store")
    mapped = open_store(tmp_path / "store")
    x, edges = mapped.single_nodes.x, mapped.single_edges
    assert x is not None and is_paged(x) and is_paged(edges.src) and not is_paged(edges.indptr)
    loaders = [NeighborLoader(g, [4, 3], batch_size=32) for g in (graph, mapped)]
    assert all(same(in_memory, paged) for in_memory, paged in zip(*loaders, strict=True))


def test_batches_depend_on_the_seed_and_the_epoch_alone(graph: Graph) -> None:
    prefetching = NeighborLoader(graph, [4, 3], batch_size=8, input_nodes="train", shuffle=True, prefetch=2)
    plain = NeighborLoader(graph, [4, 3], batch_size=8, input_nodes="train", shuffle=True, prefetch=0)
    epochs = [(list(prefetching), list(plain)) for _ in range(2)]
    assert all(same(a, b) for first, second in epochs for a, b in zip(first, second, strict=True))
    assert not torch.equal(epochs[0][0][0].seeds, epochs[1][0][0].seeds)
    plain.epoch = 1
    assert all(same(a, b) for a, b in zip(epochs[1][0], plain, strict=True))
    other = next(iter(NeighborLoader(graph, [4, 3], batch_size=8, input_nodes="train", shuffle=True, seed=1)))
    assert not torch.equal(other.seeds, epochs[0][0][0].seeds)


def test_overlapping_loops_are_independent(graph: Graph) -> None:
    loader = NeighborLoader(graph, [4, 3], batch_size=32)
    first, second = iter(loader), iter(loader)
    pairs = list(zip(first, second, strict=True))
    fresh = NeighborLoader(graph, [4, 3], batch_size=32)
    assert all(same(a, b) for (a, _), b in zip(pairs, fresh, strict=True))
    assert all(same(a, b) for (_, a), b in zip(pairs, fresh, strict=True))


def test_without_shuffling_seeds_keep_their_order(graph: Graph) -> None:
    ids = torch.tensor([7, 3, 200, 9, 1])
    loader = NeighborLoader(graph, [2], batch_size=2, input_nodes=ids, drop_last=True)
    assert [batch.seeds.tolist() for batch in loader] == [[7, 3], [200, 9]] and len(loader) == 2
    mask = torch.zeros(300, dtype=torch.bool)
    mask[ids] = True
    for nodes in (mask, ids, ("node", mask), ids.tolist()):
        batch = next(iter(NeighborLoader(graph, [2], batch_size=9, input_nodes=nodes, shuffle=True)))
        assert batch.seeds.tolist() == [1, 3, 7, 9, 200]
    assert len(NeighborLoader(graph, [2], batch_size=100)) == 3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_half_precision_becomes_float32(graph: Graph, dtype: torch.dtype) -> None:
    x = graph.single_nodes.x
    assert x is not None
    batch = next(iter(NeighborLoader(graph.with_nodes("node", x=x.to(dtype)), [2], batch_size=9)))
    assert isinstance(batch.x, torch.Tensor) and isinstance(batch.n_id, torch.Tensor)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert torch.equal(batch.x, x.to(dtype)[batch.n_id].to(wide)) and batch.x.dtype == wide


def test_batches_of_several_node_types_are_dicts() -> None:
    graph = make_dataset("shop", seed=1, users=60, products=40, brands=5, buys=400, views=600)
    batch = next(iter(NeighborLoader(graph, [3, 3], batch_size=8, input_nodes=("user", [5, 2]), shuffle=True)))
    assert isinstance(batch.x, dict) and isinstance(batch.n_id, dict)
    assert batch.n_id["user"][:2].tolist() == [2, 5]
    for kind, rows in batch.x.items():
        x = graph.nodes[kind].x
        assert x is not None and torch.equal(rows, x[batch.n_id[kind]].float())
    assert len(NeighborLoader(graph, [3], batch_size=60, input_nodes="user")) == 1


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"batch_size": 0}, ConfigError, "batch_size"),
    ({"prefetch": -1}, ConfigError, "prefetch"),
    ({"weight_attr": "cost"}, ConfigError, "weight_attr"),
    ({"input_nodes": "training"}, ConfigError, "train, val, test"),
    ({"input_nodes": ("user", [1])}, ConfigError, "no nodes of type 'user'"),
    ({"input_nodes": [1, 1]}, InputError, "different store ids"),
    ({"input_nodes": [300]}, InputError, "different store ids"),
    ({"input_nodes": torch.ones(3, dtype=torch.bool)}, InputError, "300 entries"),
]


@pytest.mark.parametrize(("arguments", "error", "message"), WRONG)
def test_wrong_arguments_are_refused(
    graph: Graph, arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        NeighborLoader(graph, [2], **arguments)


def prefetch_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "gnnfleet-prefetch"]


def numbers(stop: int, computed: list[int]) -> Iterator[int]:
    for i in range(stop):
        assert num_threads() == 1 or threading.current_thread() is threading.main_thread()
        computed.append(i)
        yield i


def wait_for_end() -> None:
    deadline = time.monotonic() + 10
    while prefetch_threads() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not prefetch_threads()


@pytest.mark.parametrize("depth", [0, 1, 2, 5])
def test_prefetched_values_are_complete_and_in_order(depth: int) -> None:
    assert list(prefetch_items(numbers(20, []), depth)) == list(range(20))
    wait_for_end()


def test_no_more_than_depth_values_are_prefetched() -> None:
    computed: list[int] = []
    values = prefetch_items(numbers(100, computed), 2)
    assert next(values) == 0
    time.sleep(0.3)
    assert len(computed) <= 4  # one in use, two waiting, one in progress
    values.close()
    wait_for_end()
    assert len(computed) <= 4


def broken() -> Iterator[int]:
    yield 1
    raise ValueError("no such batch")


def test_an_error_of_the_thread_is_raised_in_the_loop() -> None:
    values = prefetch_items(broken(), 2)
    assert next(values) == 1
    with pytest.raises(ValueError, match="no such batch") as caught:
        next(values)
    assert "in broken" in "".join(traceback.format_tb(caught.value.__traceback__)), (
        "the traceback of the thread is missing"
    )
    wait_for_end()


def test_an_abandoned_loop_ends_its_thread(graph: Graph) -> None:
    loader = NeighborLoader(graph, [4, 3], batch_size=4)
    for _ in loader:
        break
    gc.collect()
    wait_for_end()
    iterator = iter(loader)
    next(iterator)
    del iterator
    gc.collect()
    wait_for_end()


def test_an_interrupt_ends_the_loop() -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore it

    def slow() -> Iterator[int]:
        yield 0
        time.sleep(1.5)
        yield 1

    def interrupt() -> None:
        import _thread

        _thread.interrupt_main()

    started = time.monotonic()
    timer = threading.Timer(0.3, interrupt)
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            list(prefetch_items(slow(), 2))
    finally:
        signal.signal(signal.SIGINT, before)
    assert time.monotonic() - started < 10
    timer.join(5)
    wait_for_end()
