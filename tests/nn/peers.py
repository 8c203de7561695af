"""Random graphs, blocks, and comparison of our modules with torch_geometric's: outputs and all gradients."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gnnfleet.graph.graph import EDGE, NODE, Graph
from gnnfleet.graph.views.local import LocalEdges, LocalView
from gnnfleet.graph.views.view_base import NodeRows
from gnnfleet.ops.csr import CSR

DTYPES = (torch.float32, torch.float64)


def random_graph(seed: int = 0, *, nodes: int = 30, edges: int = 140, loops: bool = False, width: int = 5) -> Graph:
    """With parallel edges, isolated nodes, edge weights (eighths, so that sums are exact) and edge features."""
    random = torch.Generator().manual_seed(seed)
    index = torch.randint(0, nodes - 3, (2, edges), generator=random)
    if not loops:
        index = index[:, index[0] != index[1]]
    count = index.shape[1]
    return Graph(
        index,
        x=torch.randn(nodes, width, generator=random),
        y=torch.randint(0, 3, (nodes,), generator=random),
        num_nodes=nodes,
        edge_weight=torch.randint(1, 9, (count,), generator=random) / 8,
        edge_attr=torch.randn(count, 4, generator=random),
    )


def block(graph: Graph, num_dst: int) -> tuple[LocalView, Tensor]:
    """(the in-edges of the first nodes as a block whose rows are all nodes, their edge_index)."""
    edges = graph.single_edges
    last = int(edges.indptr[num_dst])
    whole = LocalView.of_graph(graph)
    attr, weight = edges.attr, edges.weight
    relation = LocalEdges(
        CSR(edges.indptr[: num_dst + 1], edges.src[:last], graph.num_nodes),
        torch.arange(last),
        None if weight is None else weight[:last],
        None if attr is None else attr[:last],
    )
    rows = NodeRows(torch.arange(graph.num_nodes), num_dst, whole.nodes[NODE].degree)
    return LocalView({NODE: rows}, {EDGE: relation}), edges.edge_index()[:, :last]


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    # float32: the gradient of a bias before batch norm is rounding only, of up to some 1e-5.
    return {"rtol": 1e-5, "atol": 5e-5} if dtype == torch.float32 else {"rtol": 1e-10, "atol": 1e-10}


def compare(
    ours: torch.nn.Module,
    theirs: torch.nn.Module,
    x: Tensor,
    *,
    call_ours: Callable[[Tensor], Tensor],
    call_theirs: Callable[[Tensor], Tensor],
) -> None:
    """Assert equal outputs and gradients of x and all parameters; each module loads the other's weights."""
    randomise(ours)
    theirs.to(x.dtype).load_state_dict(ours.state_dict())
    ours.load_state_dict(theirs.state_dict())
    limits = tolerance(x.dtype)
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    out, expected = call_ours(a), call_theirs(b)
    torch.testing.assert_close(out, expected, **limits)
    pull = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1), dtype=x.dtype)
    out.backward(pull)
    expected.backward(pull)
    torch.testing.assert_close(a.grad, b.grad, **limits)
    others = dict(theirs.named_parameters())
    assert set(others) == {name for name, _ in ours.named_parameters()}
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(
            parameter.grad, others[name].grad, **limits, msg=lambda text, name=name: f"{name}: {text}"
        )


def randomise(module: torch.nn.Module) -> None:
    """Biases start at 0 and would hide mistakes."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn(parameter.shape, dtype=parameter.dtype) * 0.1)
