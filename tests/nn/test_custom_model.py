"""Custom models run as ours do; an error in the file becomes one message with file and line."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from gnnfleet import nn
from gnnfleet.errors import ConfigError, InputError
from gnnfleet.graph.datasets import make_dataset
from gnnfleet.graph.graph import Graph
from gnnfleet.graph.views.block import full_block
from gnnfleet.graph.views.local import LocalView
from gnnfleet.nn.custom_model import annotate_model_errors, build_custom_model
from gnnfleet.ops.draws import DrawKey

Write = Callable[[str], str]

PLAIN = """
import gnnfleet as gf

def make(config, graph, out_channels):
    wide = graph.single_nodes.x.shape[1]
    first, last = gf.nn.SAGEConv(wide, config.hidden), gf.nn.SAGEConv(config.hidden, out_channels)
    return gf.nn.Model([first, last], dropout=config.dropout)
"""


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def text_to_name(text: str, factory: str = "make") -> str:
        (tmp_path / "mine.py").write_text(text)
        return f"{tmp_path / 'mine.py'}:{factory}"

    return text_to_name


@pytest.fixture(scope="module")
def graph() -> Graph:
    return make_dataset("communities", nodes=200, mean_degree=6, seed=2)


def build(name: str, graph: Graph) -> nn.Model:
    torch.manual_seed(0)
    config = nn.ModelConfig(name=name, hidden=16, layers=2, dropout=0.4)
    return build_custom_model(config, graph, out_channels=10)


def test_a_list_of_layers_is_our_model_of_those_layers(write: Write, graph: Graph) -> None:
    custom = build(write(PLAIN), graph)
    torch.manual_seed(0)
    ours = nn.build_model(nn.SAGE(hidden=16, layers=2, dropout=0.4), graph)
    x, view = graph.single_nodes.x, LocalView.of_graph(graph).with_step(key=DrawKey(3, 1, 4))
    assert torch.equal(custom(view, x), ours(view, x))  # dropout too
    assert torch.equal(custom.embed(view, x), ours.embed(view, x))
    custom.eval()
    assert torch.equal(custom(view, x), ours.eval()(view, x))
    assert custom.num_layers == 2 and custom.width == 64 and custom.out_channels == 10 and not custom.batch_norm


def test_compute_may_carry_a_tensor_past_layers(write: Write, graph: Graph) -> None:
    name = write("""
import torch, gnnfleet as gf

class Carrying(gf.nn.Model):
    def __init__(self, wide, hidden, out):
        super().__init__([gf.nn.SAGEConv(wide, hidden), gf.nn.SAGEConv(hidden, hidden), gf.nn.SAGEConv(hidden, out)])
        self.norm = gf.nn.BatchNorm(hidden)
        self.skip = torch.nn.Linear(hidden, out)

    def compute(self, index, view, x, carry):
        x = self.layers[index](view, x)
        if index == 0:
            return torch.relu(self.norm(view, x)), x
        carry = carry[:view.num_dst]
        return (x + carry, carry) if index == 1 else (x + self.skip(carry), None)

def make(config, graph, out_channels):
    return Carrying(graph.single_nodes.x.shape[1], config.hidden, out_channels)
""")
    model = build(name, graph)
    assert model.batch_norm and model.num_layers == 3
    model.eval()
    view = LocalView.of_graph(graph).with_step(training=False)
    x = graph.single_nodes.x
    assert x is not None
    whole = model(view, x)
    rows, carry = model.layer(0, view, x)
    block = full_block(view, {"node": (20, 60)})
    assert isinstance(rows, torch.Tensor) and carry is not None
    at = block.rows["node"]
    block_rows, block_carry = model.layer(1, block.view, rows[at], carry[at])
    assert block_carry is not None and isinstance(block_rows, torch.Tensor)
    torch.testing.assert_close(block_rows, model.layer(1, view, rows, carry)[0][20:60])
    assert whole.shape == (200, 10)


def test_nothing_is_left_in_the_folder_and_neighbours_can_be_imported(
    write: Write, graph: Graph, tmp_path: Path
) -> None:
    (tmp_path / "beside_mine.py").write_text("HIDDEN = 8\n")
    before, flag = list(sys.path), sys.dont_write_bytecode
    sys.dont_write_bytecode = True
    model = build(write("from beside_mine import HIDDEN\n" + PLAIN.replace("config.hidden", "HIDDEN")), graph)
    sys.dont_write_bytecode = flag
    assert model.layers[0].out_channels == 8
    assert sys.path == before and sorted(p.name for p in tmp_path.iterdir()) == ["beside_mine.py", "mine.py"]


MISTAKES = [
    ("def make(config graph):\n    pass", "mine.py, line 1: SyntaxError"),
    ("import torch\nimport no_such_module", "mine.py, line 2: ModuleNotFoundError: No module named 'no_such_module'"),
    ("x = 1\n\ny = x / 0", "mine.py, line 3: ZeroDivisionError: division by zero"),
    ("def make(config, graph, out_channels):\n    return config.hiden", "mine.py, line 2: AttributeError"),
    (
        "def make(config):\n    return 1",
        r"mine.py:make must take \(config, graph, out_channels\): too many positional arguments",
    ),
    ("def mak(config):\n    return 1", "has no function 'make': did you mean 'mak'?"),
    ("import math", "has no function 'make': it defines none"),
    ("def make(*_):\n    return 3", "mine.py:make must return a gf.nn.Model or a torch_geometric module, found int"),
    (
        "import torch\ndef make(*_):\n    return torch.nn.Linear(1, 1)",
        "Linear.forward takes input: expected arguments x and edge_index",
    ),
    ("import gnnfleet as gf\ndef make(*_):\n    return gf.nn.Model()", "a model without layers"),
    (
        "import gnnfleet as gf, torch\ndef make(*_):\n    return gf.nn.Model([torch.nn.Dropout(0.5)])",
        r"torch.nn.Dropout \(layers.0\), which no run can reproduce: use view.dropout",
    ),
    (
        "import gnnfleet as gf, torch\ndef make(*_):\n    return gf.nn.Model([torch.nn.BatchNorm1d(3)])",
        "use gf.nn.BatchNorm",
    ),
]


@pytest.mark.parametrize(("text", "message"), MISTAKES)
def test_mistakes_name_file_and_line(write: Write, graph: Graph, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        build(write(text), graph)
    assert "\n" not in str(caught.value)
    assert "line" not in message or caught.value.__cause__ is not None


def test_a_missing_file_is_an_error(graph: Graph, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the model file .*none\.py: No such file"):
        build(f"{tmp_path}/none.py:make", graph)


LAYERS = [
    ("return x", r"compute must return \(rows, carry\), found Tensor in layer 0"),
    ("return x.tolist(), None", "layer 0 of the model must return"),
    ("return x[:7], None", "must return a row for each of 200 destinations, found 7: select the destinations with"),
    ("return x, None", "the last layer of the model must return 10 columns, found rows of shape"),
]


@pytest.mark.parametrize(("body", "message"), LAYERS)
def test_shapes_of_returned_rows_are_checked(write: Write, graph: Graph, body: str, message: str) -> None:
    text = f"""
import gnnfleet as gf, torch
class Mine(gf.nn.Model):
    def compute(self, index, view, x, carry):
        {body}
def make(*_):
    return Mine([torch.nn.Linear(2, 2)])
"""
    with pytest.raises(ConfigError, match=message):
        build(write(text), graph)(LocalView.of_graph(graph), graph.single_nodes.x)


def test_errors_outside_the_model_file_are_not_annotated(tmp_path: Path) -> None:
    for path in (None, tmp_path / "mine.py"):
        with pytest.raises(ValueError, match="elsewhere"), annotate_model_errors(path):
            raise ValueError("elsewhere")
    with (
        pytest.raises(InputError, match=rf"{Path(__file__).name}, line \d+: bad row"),
        annotate_model_errors(Path(__file__)),
    ):
        raise InputError("bad row")
