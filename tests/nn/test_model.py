from __future__ import annotations

import pytest
import torch
import torch_geometric.nn.models as pyg
from hypothesis import given, settings
from hypothesis import strategies as st

from gnnfleet.errors import ConfigError
from gnnfleet.graph.graph import Graph
from gnnfleet.graph.view import LocalView
from gnnfleet.nn.config import GAT, GCN, NAMES, SAGE, ModelConfig
from gnnfleet.nn.heads import NodeHead, micro_f1, roc_auc
from gnnfleet.nn.model import GNN, build_model
from gnnfleet.nn.norm import BatchNorm
from gnnfleet.ops.draws import DrawKey
from tests.nn.test_conv import IN, OUT, N, graph_of


@pytest.mark.parametrize("norm", ["none", "batch", "layer"])
@pytest.mark.parametrize("name", ["gcn", "sage", "gat", "gatv2", "gin"])
def test_models_exchange_weights_with_pyg(name: str, norm: str) -> None:
    """Same keys both ways, same logits in train and eval mode (dropout off), same running statistics."""
    torch.manual_seed(0)
    graph = graph_of()
    view, index = LocalView.whole(graph), graph.only_edges.edge_index()
    x = torch.randn(N, IN)
    ours = GNN(ModelConfig(name=name, hidden=8, layers=3, dropout=0, norm=norm, heads=2), IN, OUT)
    words = {"gatv2": {"v2": True, "heads": 2}, "gat": {"heads": 2}}.get(name, {})
    kind = {"gcn": pyg.GCN, "sage": pyg.GraphSAGE, "gin": pyg.GIN}.get(name, pyg.GAT)
    peer_norm = {"none": None, "batch": "BatchNorm", "layer": "LayerNorm"}[norm]
    extra = {"norm_kwargs": {"mode": "node"}} if norm == "layer" else {}
    if name == "gin" and norm != "none":
        pytest.skip("PyG's GIN also puts the norm inside its MLP")
    theirs = kind(IN, 8, 3, OUT, norm=peer_norm, **extra, **words)
    theirs.load_state_dict(ours.state_dict())
    torch.testing.assert_close(ours(view, x), theirs(x, index), rtol=1e-4, atol=1e-5)
    for k, b in theirs.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[k], b, rtol=1e-5, atol=1e-5)
    ours.eval()
    theirs.eval()
    torch.testing.assert_close(ours(view, x), theirs(x, index), rtol=1e-4, atol=1e-5)
    ours.load_state_dict(theirs.state_dict())


@pytest.mark.parametrize("name", [n for n in NAMES if n != "rgcn"])
def test_gradcheck_with_dropout(name: str) -> None:
    torch.manual_seed(0)
    graph = graph_of()
    view = LocalView.whole(graph).at(key=DrawKey(1, 2, 3))
    words = {"attention_dropout": 0.2} if name.startswith("gat") else {}
    model = GNN(ModelConfig(name=name, hidden=4, layers=2, heads=2, dropout=0.3, input_dropout=0.1, **words), IN, 3)
    model = model.double()
    x = torch.randn(N, IN, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: model(view, x)[:4], (x,), atol=1e-4)


def test_relational_models_take_several_types() -> None:
    from gnnfleet.graph.datasets import make_dataset

    graph = make_dataset("shop", users=60, products=40, brands=5)
    model = build_model(ModelConfig(name="rgcn", hidden=8, layers=2), graph)
    x = {kind: nodes.x for kind, nodes in graph.nodes.items()}
    logits = model(LocalView.whole(graph), x)
    target = graph.labelled_type
    assert target is not None and logits.shape == (graph.nodes[target].count, graph.nodes[target].num_classes)
    logits.sum().backward()
    assert all(p.grad is not None for p in model.tables.values())
    with pytest.raises(ConfigError, match="use --model rgcn"):
        build_model(ModelConfig(name="gcn"), graph)


def test_graphs_without_features_need_an_embedding() -> None:
    graph = Graph(torch.randint(0, 9, (2, 30)), num_nodes=9, y=torch.arange(9) % 3)
    with pytest.raises(ConfigError, match=r"model\.embedding"):
        build_model(GCN(), graph)
    model = build_model(SAGE(embedding=4, hidden=8, layers=2), graph)
    assert model(LocalView.whole(graph), None).shape == (9, 3)


def test_words_are_checked() -> None:
    with pytest.raises(ConfigError, match="did you mean 'sage'"):
        from gnnfleet.nn.config import _named

        _named("sgae")()
    with pytest.raises(ConfigError, match="multiple of heads"):
        GAT(hidden=10, heads=4)
    with pytest.raises(ConfigError, match="takes as many views"):
        GNN(SAGE(layers=2), 3, 2)([LocalView.whole(graph_of())], torch.zeros(N, 3))


def test_batch_norm_equals_torch() -> None:
    view = LocalView.whole(graph_of())
    ours, theirs = BatchNorm(IN), torch.nn.BatchNorm1d(IN)
    for _ in range(3):
        x = torch.randn(N, IN) * 3 + 5
        one, other = x.clone().requires_grad_(), x.clone().requires_grad_()
        a, b = ours(view, one), theirs(other)
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
        a.square().mean().backward()
        b.square().mean().backward()
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-3, atol=1e-5)
    for k, v in theirs.state_dict().items():
        torch.testing.assert_close(ours.module.state_dict()[k], v)


@given(st.lists(st.tuples(st.integers(0, 4), st.booleans()), min_size=1, max_size=20))
@settings(max_examples=60, deadline=None)
def test_roc_auc_is_the_chance_of_order(pairs: list[tuple[int, bool]]) -> None:
    score, y = torch.tensor([float(s) for s, _ in pairs]), torch.tensor([int(p) for _, p in pairs])
    ups, downs = score[y == 1], score[y == 0]
    wins = [(1.0 if u > d else 0.5 if u == d else 0.0) for u in ups.tolist() for d in downs.tolist()]
    found = roc_auc(score, y)
    assert (found != found) if not wins else found == pytest.approx(sum(wins) / len(wins))


def test_heads_sum_and_ignore_the_unlabelled() -> None:
    logits, y = torch.randn(6, 3), torch.tensor([0, 1, -1, 2, -1, 1])
    known = y >= 0
    head = NodeHead()
    expected = torch.nn.functional.cross_entropy(logits[known], y[known], reduction="sum")
    torch.testing.assert_close(head.loss(logits, y), expected)
    assert head.score(logits, y) == pytest.approx(float((logits[known].argmax(1) == y[known]).float().mean()))
    many = torch.tensor([[1, 0, -1], [0, 1, 1]], dtype=torch.int8)
    assert micro_f1(torch.tensor([[1.0, 1.0, 5.0], [-1.0, 1.0, -1.0]]), many) == pytest.approx(4 / 6)
    with pytest.raises(ConfigError, match="micro_f1"):
        NodeHead(multilabel=True)
