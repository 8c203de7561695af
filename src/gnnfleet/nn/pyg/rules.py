"""Operations of a module whose result depends on who owns which rows, and how they run on a view instead.

Dropout draws by node or edge id, batch norm and graph-wide norms take statistics over all ranks, random draws that no
other number of ranks could repeat are refused. The module itself is not changed: rules hold during a pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode, resolve_name

from gnnfleet.errors import ConfigError
from gnnfleet.graph.views.view import GraphView
from gnnfleet.nn.norm import batch_norm
from gnnfleet.nn.pyg.source_index import SourceIndex


@contextmanager
def pass_over(view: GraphView, module: torch.nn.Module) -> Iterator[None]:
    """Apply the rules to all operations of a pass of ``module`` over ``view``."""
    rules = _PassRules(view)
    with ExitStack() as stack:
        for child in module.modules():
            _track_edges(rules, child, stack)
            norm = next((_NORMS[kind.__name__] for kind in type(child).__mro__ if kind.__name__ in _NORMS), None)
            if norm is not None and type(child).__module__.startswith("torch_geometric."):
                child.__dict__["forward"] = partial(norm, view, child, child.forward)
                stack.callback(child.__dict__.pop, "forward")
        stack.enter_context(rules)
        yield


class _PassRules(TorchFunctionMode):
    def __init__(self, view: GraphView) -> None:
        super().__init__()
        self.view = view
        self.num_dropouts = 0
        self.edges: Tensor | None = None  # edge_index of the messages being computed
        self.propagated: Tensor | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        rule = _RULES.get(func)
        return func(*args, **(kwargs or {})) if rule is None else rule(self, func, *args, **(kwargs or {}))


def _track_edges(rules: _PassRules, module: torch.nn.Module, stack: ExitStack) -> None:
    """Let the rules know when the rows of a MessagePassing module are those of edges."""
    if not hasattr(module, "register_propagate_forward_pre_hook"):
        return

    def begin(_: Any, inputs: tuple[Any, ...]) -> None:
        rules.edges = inputs[0]

    def propagate(_: Any, inputs: tuple[Any, ...]) -> None:
        rules.propagated = inputs[0]

    def begin_messages(_: Any, inputs: Any) -> None:
        rules.edges = rules.propagated

    def end(_: Any, inputs: Any, out: Any) -> None:
        rules.edges = None

    for register, hook in (
        (module.register_propagate_forward_pre_hook, propagate),
        (module.register_message_forward_pre_hook, begin_messages),
        (module.register_message_forward_hook, end),
        (module.register_edge_update_forward_pre_hook, begin),
        (module.register_edge_update_forward_hook, end),
    ):
        stack.callback(register(hook).remove)  # type: ignore[operator]


def _dropout(
    rules: _PassRules, func: Any, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    if not training or not p or not rules.view.training:
        return input
    rules.num_dropouts += 1
    if rules.edges is not None and not isinstance(rules.edges, SourceIndex):
        raise ConfigError("a module drops messages of edges that are not the graph's: expected edges of edge_index")
    edge_ids = None if rules.edges is None else rules.edges.edge_ids
    ids = rules.view.node_ids if edge_ids is None else edge_ids
    if len(ids) != len(input):
        raise ConfigError(f"a module drops elements of {len(input)} rows: expected those of {len(ids)} nodes or edges")
    rows = input.reshape(len(input), -1)
    return rules.view.dropout(rows, p, mask_id=rules.num_dropouts, edge_ids=edge_ids).view(input.shape)


def _batch_norm(
    rules: _PassRules,
    func: Any,
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    if not training:
        return func(input, running_mean, running_var, weight, bias, training, momentum, eps)  # type: ignore[no-any-return]
    width = input.shape[1]
    norm = SimpleNamespace(
        running_mean=input.new_zeros(width) if running_mean is None else running_mean,
        running_var=input.new_ones(width) if running_var is None else running_var,
        weight=input.new_ones(width) if weight is None else weight,
        bias=input.new_zeros(width) if bias is None else bias,
        num_batches_tracked=torch.zeros(()),  # the module counts by itself
        training=True,
        momentum=momentum,
        eps=eps,
    )
    return batch_norm(rules.view, input, norm)  # type: ignore[arg-type]


def _refuse_draws(rules: _PassRules, func: Any, *args: Any, **kwargs: Any) -> Any:
    name = resolve_name(func) or getattr(func, "__name__", str(func))
    raise ConfigError(f"a module draws random numbers with {name}, which no other number of workers would repeat")


_RULES: dict[Any, Callable[..., Any]] = {
    functional.dropout: _dropout,
    functional.batch_norm: _batch_norm,
    **dict.fromkeys(
        [
            torch.rand, torch.randn, torch.rand_like, torch.randn_like, torch.randperm, torch.randint, torch.bernoulli,
            torch.multinomial, torch.normal, Tensor.bernoulli_, Tensor.uniform_, Tensor.normal_, Tensor.exponential_,
            Tensor.random_, functional.alpha_dropout, functional.feature_alpha_dropout, functional.dropout1d,
            functional.dropout2d, functional.gumbel_softmax,
        ],
        _refuse_draws,
    ),
}  # fmt: skip


# -- norms over all nodes: (view, module, the forward they replace, arguments of the call) --


def _mean(view: GraphView, x: Tensor) -> Tensor:
    """Collective. [F] mean over the nodes of all ranks."""
    total = view.sum_over_nodes(torch.cat([x.sum(0), x.new_full((1,), len(x))]))
    return total[:-1] / total[-1].detach()


def _pair_norm(view: GraphView, module: Any, forward: Any, x: Tensor, batch: Any = None, *args: Any) -> Tensor:
    if batch is not None:
        return forward(x, batch, *args)  # type: ignore[no-any-return]
    x = x - _mean(view, x)
    if module.scale_individually:
        return module.scale * x / (module.eps + x.norm(2, -1, keepdim=True))  # type: ignore[no-any-return]
    squares = _mean(view, x.pow(2).sum(-1, keepdim=True))
    return module.scale * x / (module.eps + squares).sqrt()  # type: ignore[no-any-return]


def _graph_norm(view: GraphView, module: Any, forward: Any, x: Tensor, batch: Any = None, *args: Any) -> Tensor:
    if batch is not None:
        return forward(x, batch, *args)  # type: ignore[no-any-return]
    x = x - _mean(view, x) * module.mean_scale
    return module.weight * x / (_mean(view, x.pow(2)) + module.eps).sqrt() + module.bias  # type: ignore[no-any-return]


def _graph_layer_norm(view: GraphView, module: Any, forward: Any, x: Tensor, batch: Any = None, *args: Any) -> Tensor:
    if batch is not None or module.mode != "graph":
        return forward(x, batch, *args)  # type: ignore[no-any-return]
    x = x - _mean(view, x).mean()
    x = x / (_mean(view, x.pow(2)).mean().sqrt() + module.eps)
    return x if module.weight is None else x * module.weight + module.bias


def _mean_subtraction_norm(view: GraphView, module: Any, forward: Any, x: Tensor, batch: Any = None, *args: Any) -> Any:
    return forward(x, batch, *args) if batch is not None else x - _mean(view, x)


def _graph_size_norm(view: GraphView, module: Any, forward: Any, x: Tensor, batch: Any = None, *args: Any) -> Any:
    if batch is not None:
        return forward(x, batch, *args)
    return x * view.sum_over_nodes(x.new_full((1,), len(x))).pow(-0.5)


def _instance_norm(view: GraphView, module: Any, forward: Any, x: Tensor, batch: Any = None, *args: Any) -> Any:
    uses_statistics = module.training or not module.track_running_stats
    if batch is not None or not uses_statistics:
        return forward(x, batch, *args)
    norm = SimpleNamespace(
        running_mean=x.new_zeros(x.shape[1]) if module.running_mean is None else module.running_mean,
        running_var=x.new_ones(x.shape[1]) if module.running_var is None else module.running_var,
        weight=x.new_ones(x.shape[1]) if module.weight is None else module.weight,
        bias=x.new_zeros(x.shape[1]) if module.bias is None else module.bias,
        num_batches_tracked=torch.zeros(()),
        training=True,
        momentum=module.momentum,
        eps=module.eps,
    )
    return batch_norm(view, x, norm)  # type: ignore[arg-type]


_NORMS: dict[str, Callable[..., Any]] = {
    "PairNorm": _pair_norm,
    "GraphNorm": _graph_norm,
    "LayerNorm": _graph_layer_norm,
    "MeanSubtractionNorm": _mean_subtraction_norm,
    "GraphSizeNorm": _graph_size_norm,
    "InstanceNorm": _instance_norm,
}
