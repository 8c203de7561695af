"""torch_geometric modules cut into layers: on all rows and on blocks with all neighbours, as the whole module."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gnnfleet.graph.sampling.sampler import NeighborSampler
from gnnfleet.graph.views.local import LocalView
from gnnfleet.nn.pyg.module import PygModule
from tests.equivalence.spread import KEY, plain_graph
from tests.nn.pyg.outcomes import assert_equal, build, outcome, run_plain
from tests.nn.pyg.zoo import MODULES

SEEDS = torch.tensor([3, 17, 25, 40, 55, 8])
# Modules that run as a whole, and a part of the reason.
WHOLE = {
    "scattered": "reads nodes and edges outside of a convolution",
    **dict.fromkeys(["TAGConv", "SGConv", "ChebConv", "ARMAConv", "APPNP", "GatedGraphConv"], "more than once"),
    "MixHopConv": "more than once",
    **dict.fromkeys(["graph norm", "pair norm", "layer norm of the graph"], "reads all nodes"),
    **dict.fromkeys(["mean subtraction norm", "graph size norm", "instance norm"], "reads all nodes"),
}
SPLIT = [name for name in MODULES if name not in WHOLE]


def split(name: str) -> PygModule:
    model = PygModule(build(MODULES[name]))
    model.split(plain_graph())
    return model


def features() -> torch.Tensor:
    x = plain_graph().single_nodes.x
    assert x is not None
    return x.double()


@pytest.mark.parametrize("name", WHOLE)
def test_modules_that_cannot_be_cut_say_why(name: str) -> None:
    model = split(name)
    assert model.reads_whole_graph and WHOLE[name] in model.reason_whole


@pytest.mark.parametrize("name", SPLIT)
def test_layers_equal_the_whole_module(name: str) -> None:
    model, x = split(name), features().requires_grad_()
    assert not model.reason_whole and model.num_layers in (2, 3)
    view = LocalView.of_graph(plain_graph()).with_step(key=KEY)
    assert_equal(outcome(model.module, model(view, x), x, view.node_ids), run_plain(MODULES[name]), name)


@pytest.mark.parametrize("name", [name for name in SPLIT if name != "DirGNNConv"])
def test_layers_on_blocks_equal_the_whole_module(name: str) -> None:
    """Rows of other nodes are missing, so a convolution may read its neighbours only. Norms use running statistics."""
    model, whole, x = split(name), PygModule(build(MODULES[name])), features()
    blocks = NeighborSampler(plain_graph(), [-1] * model.num_layers).blocks({"node": SEEDS}, KEY)
    views = {True: [view.with_step(training=False) for view in blocks], False: LocalView.of_graph(plain_graph())}
    results: dict[bool, dict[str, Any]] = {}
    for is_cut, run in ((True, model), (False, whole)):
        rows = x.clone().requires_grad_()
        run.eval()
        out = (
            run(views[True], rows[blocks[0].node_ids]) if is_cut else run(views[False].with_step(training=False), rows)
        )  # type: ignore[union-attr]
        out = out if is_cut else out[SEEDS]
        results[is_cut] = outcome(run.module, out, rows, SEEDS)
    assert_equal(results[True], results[False], name)
