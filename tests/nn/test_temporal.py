"""Temporal models against plain implementations: outputs and the gradients of everything that has one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gnnfleet.nn.config import make_config
from gnnfleet.nn.temporal.attention import EventBlock, Hop, TemporalAttention
from gnnfleet.nn.temporal.decoders import NUM_FEATURES, ClassDecoder, EventDecoder
from gnnfleet.nn.temporal.model import EventDims, TemporalModel
from gnnfleet.ops.draws import DrawKey, Purpose, dropout_mask

WIDTH, EDGE, TIME, HEADS = 8, 3, 6, 2
KEY = DrawKey(5, 1, 2)


def make(name: str = "tgn", *, dims: EventDims | None = None, **settings: object) -> TemporalModel:
    torch.manual_seed(0)
    settings = {
        "hidden": WIDTH,
        "heads": HEADS,
        "layers": 1,
        "time_width": TIME,
        "dropout": 0.0,
        "clock": "learnt",
    } | settings
    model = TemporalModel(make_config(name, **settings), dims or EventDims(edge=EDGE)).double()
    with torch.no_grad():  # frequencies of 1 to 1e-9 would hide mistakes in their gradients
        for layer in [*model.layers, *([model.cell] if model.cell is not None else [])]:
            layer.clock.weight.uniform_(0.1, 2.0)
            layer.clock.bias.uniform_(-1.0, 1.0)
    return model


def hop(queries: int, rows: int, events: int, *, k: int = 4, seed: int = 1) -> Hop:
    """Some queries with fewer than k events, and one with none."""
    draw = torch.Generator().manual_seed(seed)
    neighbors = torch.randint(rows, (queries, k), generator=draw)
    for query in range(queries):
        neighbors[query, query % (k + 1) :] = -1
    edge = torch.randint(events, (queries, k), generator=draw)
    since = torch.rand(queries, k, generator=draw, dtype=torch.float64) * 5
    return Hop(torch.randint(rows, (queries,), generator=draw), neighbors, edge, since, torch.arange(queries) * 3 + 7)


def plain_attention(layer: TemporalAttention, hop: Hop, h: Tensor, features: Tensor | None, drop: float) -> Tensor:
    """Reference: one query after the other, with explicit keys and values of every event."""
    masks = {
        purpose: dropout_mask(torch.Size(shape), drop, ids=hop.ids, draws=KEY.draws(purpose, layer.layer))
        for purpose, shape in (
            (Purpose.ATTENTION, (len(hop.query), layer.heads, hop.neighbors.shape[1])),
            (Purpose.DROPOUT, (len(hop.query), layer.width)),
        )
    }
    out = []
    for row, node in enumerate(hop.query.tolist()):
        node_row = h[node]
        query = layer.query(torch.cat([node_row, torch.cos(torch.zeros(()) * layer.clock.weight + layer.clock.bias)]))
        gathered = torch.zeros(layer.width, dtype=h.dtype)
        events = [event for event, other in enumerate(hop.neighbors[row].tolist()) if other >= 0]
        if events:
            seen = []
            for event in events:
                time = torch.cos(hop.time_delta[row, event] * layer.clock.weight + layer.clock.bias)
                edge = [] if features is None else [features[hop.edge[row, event]]]
                seen.append(torch.cat([h[hop.neighbors[row, event]], *edge, time]))
            keys = layer.key(torch.stack(seen)).view(len(events), layer.heads, -1)
            values = layer.value(torch.stack(seen)).view(len(events), layer.heads, -1)
            score = torch.nn.functional.leaky_relu((keys * query.view(layer.heads, -1)).sum(2), 0.2)
            share = torch.softmax(score, 0) * masks[Purpose.ATTENTION][row][:, events].t()
            gathered = (share[..., None] * values).sum(0).flatten()
        mixed = layer.out(torch.cat([gathered, node_row])) * masks[Purpose.DROPOUT][row]
        out.append(layer.norm(torch.relu(mixed)))
    return torch.stack(out)


def gradients(out: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    draw = torch.Generator().manual_seed(3)
    weight = torch.rand(out.shape, generator=draw, dtype=out.dtype)
    grads = torch.autograd.grad((out * weight).sum(), inputs, allow_unused=True)
    return [torch.zeros_like(i) if g is None else g for i, g in zip(inputs, grads, strict=True)]


def assert_alike(ours: Tensor, plain: Tensor, inputs: list[Tensor]) -> None:
    torch.testing.assert_close(ours, plain, rtol=1e-10, atol=1e-12)
    for mine, theirs in zip(gradients(ours, inputs), gradients(plain, inputs), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("edge", [0, EDGE])
@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("layers", [1, 2])
def test_attention_equals_a_loop_over_events(edge: int, dropout: float, layers: int) -> None:
    model = make(dims=EventDims(edge=edge), layers=layers, dropout=dropout)
    features = torch.randn(9, edge, dtype=torch.float64) if edge else None
    h = torch.randn(11, WIDTH, dtype=torch.float64, requires_grad=True)
    hops = [hop(7, 11, 9)] if layers == 1 else [hop(12, 11, 9), hop(5, 12, 9, seed=2)]
    ours = model.embed(EventBlock(torch.arange(11), tuple(hops), features), h, KEY)
    plain = h
    for layer, hop_of_layer in zip(model.layers, hops, strict=True):
        assert isinstance(layer, TemporalAttention)
        plain = plain_attention(layer, hop_of_layer, plain, features, dropout)
    assert_alike(ours, plain, [h, *model.layers.parameters()])


def test_a_query_without_events_reads_its_own_row_alone() -> None:
    model = make()
    nobody = torch.full((2, 3), -1)
    alone = Hop(torch.tensor([1, 0]), nobody, nobody * 0, torch.zeros(2, 3, dtype=torch.float64), torch.arange(2))
    h = torch.randn(2, WIDTH, dtype=torch.float64)
    z = model.embed(EventBlock(torch.arange(2), (alone,), torch.zeros(1, EDGE, dtype=torch.float64)), h, KEY)
    layer = model.layers[0]
    assert isinstance(layer, TemporalAttention)
    inputs = torch.cat([torch.zeros(2, WIDTH, dtype=torch.float64), h[[1, 0]]], 1)
    torch.testing.assert_close(z, layer.norm(torch.relu(layer.out(inputs))))


@pytest.mark.parametrize("edge", [0, EDGE])
def test_the_cell_equals_torchs_gru(edge: int) -> None:
    model = make(dims=EventDims(edge=edge))
    cell = model.cell
    assert cell is not None
    gru = torch.nn.GRUCell(2 * WIDTH + edge + TIME, WIDTH, dtype=torch.float64)
    gru.load_state_dict({name: tensor for name, tensor in cell.state_dict().items() if not name.startswith("clock")})
    mail, features, memory = (torch.randn(6, width, dtype=torch.float64) for width in (2 * WIDTH, edge, WIDTH))
    since = torch.rand(6, dtype=torch.float64) * 4
    ours = model.update(mail, features if edge else None, since, memory)
    clock, names = [cell.clock.weight, cell.clock.bias], ["weight_ih", "weight_hh", "bias_ih", "bias_hh"]
    time = torch.cos(since[:, None] * clock[0] + clock[1])
    plain = gru(torch.cat([mail, features, time], 1), memory)
    torch.testing.assert_close(ours, plain)
    mine = gradients(ours, [*clock, *(getattr(cell, name) for name in names)])
    theirs = gradients(plain, [*clock, *(getattr(gru, name) for name in names)])
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other)


def test_static_rows_are_added_to_memory() -> None:
    memory, static = torch.randn(4, WIDTH, dtype=torch.float64), torch.randn(4, WIDTH, dtype=torch.float64)
    same = make(dims=EventDims(static=WIDTH))
    assert same.static is None, "a learnt table alone has no projection"
    assert torch.equal(same.combine_static(memory, static, rows=4), memory + static)
    for sizes in (
        EventDims(static=5, has_features=True),
        EventDims(static=WIDTH, has_features=True),
        EventDims(static=WIDTH + 5, has_features=True),
    ):
        mapped = make(dims=sizes)
        assert mapped.static is not None, "features have one, however wide"
        other = torch.randn(4, sizes.static, dtype=torch.float64)
        torch.testing.assert_close(mapped.combine_static(memory, other, rows=4), memory + mapped.static(other))
    assert torch.equal(make("tgat").combine_static(None, None, rows=4), torch.zeros(4, WIDTH, dtype=torch.float64))


def test_only_tgn_has_both_memory_and_attention() -> None:
    block = EventBlock(torch.arange(5), (hop(3, 5, 2),), torch.randn(2, EDGE, dtype=torch.float64))
    h = torch.randn(5, WIDTH, dtype=torch.float64)
    assert torch.equal(make("tgn-id").embed(block, h, KEY), h[block.hops[0].query])
    without = make("tgat")
    assert not without.has_memory and without.cell is None
    torch.testing.assert_close(without.embed(block, h, KEY).shape, torch.Size([3, WIDTH]))


def test_decoders_equal_their_formulas() -> None:
    model, classes = make(), make(dims=EventDims(edge=EDGE, classes=3))
    z = torch.randn(4, WIDTH, dtype=torch.float64)
    link, head = model.decoder, classes.decoder
    assert isinstance(link, EventDecoder) and isinstance(head, ClassDecoder)
    score = link.scores(link.sources(z)[:, None], link.destinations(z))
    for u in range(4):
        for v in range(4):
            torch.testing.assert_close(score[u, v], link.out(torch.relu(link.src(z[u]) + link.dst(z[v])))[0])
    torch.testing.assert_close(head(z[:2], z[2:]), head.out(torch.cat([z[:2], z[2:]], 1)))


def test_equal_rows_have_equal_scores() -> None:
    """Bit for bit, at any position."""
    torch.manual_seed(0)
    decoder = EventDecoder(100)
    for count, candidates in ((1, 1), (3, 7), (5, 130)):
        sources, row = torch.randn(count, 1, 100), torch.randn(100)
        scores = decoder.scores(sources, row.repeat(count, candidates, 1))
        assert torch.equal(scores, scores[:, :1].expand(count, candidates))
        assert torch.equal(scores[:, 0], decoder.scores(sources[:, 0], row.repeat(count, 1)))


def test_scores_stay_float32_under_autocast() -> None:
    """bfloat16 has so few numbers that ranks would be full of ties."""
    decoder = make(pairs=True).float().decoder
    assert isinstance(decoder, EventDecoder)
    sources, others, pairs = torch.randn(40, WIDTH), torch.randn(120, WIDTH), torch.rand(40, 3, NUM_FEATURES)

    def scores() -> Tensor:
        rows = decoder.destinations(others).view(40, 3, -1)
        return decoder.scores(decoder.sources(sources)[:, None], rows, pairs)

    with torch.autocast("cpu", torch.bfloat16):
        rounded = scores()
    assert rounded.dtype == torch.float32
    assert float((rounded != rounded.bfloat16().float()).double().mean()) > 0.9
    torch.testing.assert_close(rounded, scores(), rtol=0.1, atol=0.1)


def test_bf16_products_change_little() -> None:
    model = make().float()
    block = EventBlock(torch.arange(5), (hop(6, 5, 2),), torch.randn(2, EDGE))
    h = torch.randn(5, WIDTH)
    exact = model.embed(block, h, KEY)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = model.embed(block, h, KEY)
    assert rounded.dtype == torch.float32
    torch.testing.assert_close(rounded, exact, rtol=0.1, atol=0.1)
