"""Operations of a module whose result depends on who owns which rows, and how they run on a view instead.

Dropout draws by node or edge id, batch norm and graph-wide norms take statistics over all ranks, random draws that no
other number of ranks could repeat are refused. Sums over sampled neighbours are scaled up to all neighbours; degrees
are static numbers of the whole graph. The module itself is not changed: rules hold during a pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from inspect import signature
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode, resolve_name

from gnnfleet.errors import ConfigError
from gnnfleet.graph.views.local import SELF_LOOP_IDS
from gnnfleet.graph.views.view import GraphView
from gnnfleet.graph.views.view_base import COUNT, LOOPS, WEIGHTED
from gnnfleet.nn.norm import batch_norm, mean_over_nodes
from gnnfleet.nn.pyg.global_modules import GLOBAL_MODULES, replaced
from gnnfleet.nn.pyg.hetero import TYPED_MODULES, RowTypes, with_function
from gnnfleet.nn.pyg.native import find_peer, is_convolution, run_native
from gnnfleet.nn.pyg.source_index import SourceIndex, plain

_DROPOUTS = 16  # of edges in one call, at most


@contextmanager
def pass_over(
    view: GraphView,
    module: torch.nn.Module,
    replacements: Replacements | None = None,
    num_dropouts: tuple[int, int] = (0, 0),
) -> Iterator[PassRules]:
    """Apply the rules to all operations of a pass of ``module`` over ``view``, after dropouts of nodes and of edges.

    ``replacements(rules, child)`` has methods by name that replace those of a child.
    """
    rules = PassRules(view, num_dropouts, is_first=has_lazy_parameters(module))
    with ExitStack() as stack:
        for child in module.modules():
            peer = find_peer(view, child)
            for name, method in replacements(rules, child).items() if replacements else ():
                stack.enter_context(replaced(child, name, method))
            _track_edges(rules, child, stack)
            _forget_other_graphs(child, stack)
            rule = next((_MODULE_RULES[name] for name in _library_classes(child) if name in _MODULE_RULES), None)
            rule = normalization_rule(child) if rule is None else rule
            if rule is not None:
                stack.enter_context(replaced(child, "forward", partial(rule, view, child, child.forward)))
            if peer is not None:
                forward = partial(run_native, peer, view, child, rules.next_edge_mask, child.forward)
                stack.enter_context(replaced(child, "forward", forward))
            if rules.row_types is not None:
                stack.callback(child.register_forward_hook(rules.row_types.mark_mapping).remove)
        stack.enter_context(rules)
        yield rules
    rules.is_active = False


def has_lazy_parameters(module: torch.nn.Module) -> bool:
    return any(isinstance(parameter, torch.nn.UninitializedParameter) for parameter in module.parameters())


class PassRules(TorchFunctionMode):
    """Rules of a pass, and its state."""

    def __init__(self, view: GraphView, num_dropouts: tuple[int, int], *, is_first: bool) -> None:
        super().__init__()
        self.view, self.is_first = view, is_first  # the first pass of a lazy module draws its parameters
        # Dropouts of nodes, and of edges by call: a call may end early on a part without edges.
        self.num_dropouts = num_dropouts
        self.is_active = True
        self.edges: Tensor | None = None  # edge_index of the messages being computed
        self.propagated: Tensor | None = None  # edge_index of a convolution that passes messages
        self.row_types = RowTypes(view) if len(view.node_types) > 1 else None

    def next_edge_mask(self) -> int:
        self.begin_edges(None)
        return self.num_dropouts[1]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        rule, kwargs = _RULES.get(func), kwargs or {}
        out = func(*args, **kwargs) if rule is None else rule(self, func, *args, **kwargs)
        if self.row_types is not None:
            self.row_types.follow(func, args, kwargs, out)
        return out

    def begin_edges(self, edges: Any) -> None:
        nodes, of_edges = self.num_dropouts
        self.edges, self.num_dropouts = edges, (nodes, (of_edges // _DROPOUTS + 1) * _DROPOUTS)

    def view_of(self, rows: Tensor) -> GraphView:
        """The view of the node type of rows."""
        return self.view if self.row_types is None else self.view.for_type(self.row_types.type_of(rows))


def _forget_other_graphs(module: torch.nn.Module, stack: ExitStack) -> None:
    """Switch off what ``cached=True`` keeps: edges of another view."""
    for name in vars(module):
        if name.startswith("_cached_"):
            setattr(module, name, None)
    if getattr(module, "cached", None) is True:
        module.cached = False  # type: ignore[assignment]
        stack.callback(setattr, module, "cached", True)


Replacements = Callable[[PassRules, torch.nn.Module], dict[str, Callable[..., Any]]]


def _track_edges(rules: PassRules, module: Any, stack: ExitStack) -> None:
    """Let the rules know when the rows of a MessagePassing module are those of edges."""
    if not is_convolution(module):
        return

    def propagate(_: Any, inputs: tuple[Any, ...]) -> None:
        rules.propagated = inputs[0]

    def end_propagate(_: Any, inputs: tuple[Any, ...], out: Any) -> None:
        if rules.row_types is not None:
            rules.row_types.mark_result(inputs[0], out)

    def end(*_: Any) -> None:
        rules.edges = None

    def end_convolution(*_: Any) -> None:
        rules.propagated = None

    def end_messages(conv: Any, inputs: Any, out: Tensor) -> Tensor:
        rules.edges = None
        return scaled_messages(conv, rules.propagated, out)

    for register, hook in (
        (module.register_propagate_forward_pre_hook, propagate),
        (module.register_propagate_forward_hook, end_propagate),
        (module.register_forward_hook, end_convolution),
        (module.register_message_forward_pre_hook, lambda *_: rules.begin_edges(rules.propagated)),
        (module.register_message_forward_hook, end_messages),
        (module.register_edge_update_forward_pre_hook, lambda _, inputs: rules.begin_edges(inputs[0])),
        (module.register_edge_update_forward_hook, end),
    ):
        stack.callback(register(hook).remove)


def _dropout(
    rules: PassRules, func: Any, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    if not training or not p or not rules.view.training:
        return input
    in_stacks = rules.edges is None and rules.row_types is None and input.dim() == 3  # [stacks, nodes, F], as ARMAConv
    if in_stacks and input.shape[1] == rules.view.num_dst != len(input):
        return _dropout(rules, func, input.movedim(1, 0), p).movedim(0, 1)
    if rules.edges is not None and not isinstance(rules.edges, SourceIndex):
        raise ConfigError("a module drops messages of edges that are not the graph's: expected edges of edge_index")
    nodes, of_edges = rules.num_dropouts
    if rules.edges is None:
        view, edge_ids = rules.view_of(input), None
        mask_id, rules.num_dropouts = nodes, (nodes + 1, of_edges)
    else:
        view, edge_ids = rules.view, rules.edges.edge_ids
        mask_id, rules.num_dropouts = of_edges, (nodes, of_edges + 1)
    ids = view.node_ids if edge_ids is None else edge_ids
    if len(ids) != len(input) and (edge_ids is not None or len(input) != view.num_dst):
        raise ConfigError(f"a module drops elements of {len(input)} rows: expected those of {len(ids)} nodes or edges")
    rows = input.reshape(len(input), input.shape[1:].numel())
    return view.dropout(rows, p, mask_id=mask_id, edge_ids=edge_ids).view(input.shape)


def _attention(rules: PassRules, func: Any, *args: Any, **kwargs: Any) -> Any:
    if kwargs["training"] and args[10] > 0:  # dropout_p
        _refuse_draws(rules, func)
    return func(*args, **kwargs)


def _batch_norm(rules: PassRules, func: Any, input: Tensor, *args: Any, **kwargs: Any) -> Any:
    arguments = signature(func).bind(input, *args, **kwargs)
    arguments.apply_defaults()
    norm = SimpleNamespace(**arguments.arguments)
    if not norm.training:
        return func(input, *args, **kwargs)
    if rules.row_types is None and rules.edges is None and rules.propagated is not None:
        num_dst = rules.view.num_dst  # behind its messages a convolution has meaningless rows of other sources
        return torch.cat([_norm_columns(rules.view, norm, input[:num_dst]), input[num_dst:]])
    return _norm_columns(rules.view, norm, input)


def _norm_columns(view: GraphView, module: Any, x: Tensor) -> Tensor:
    """Collective. Batch norm in training, of which the module may lack weights and running statistics."""
    counter = torch.zeros(())  # the module counts by itself
    norm = SimpleNamespace(training=True, momentum=module.momentum, eps=module.eps, num_batches_tracked=counter)
    for name, default in {"running_mean": 0.0, "running_var": 1.0, "weight": 1.0, "bias": 0.0}.items():
        tensor = getattr(module, name)
        setattr(norm, name, x.new_full((x.shape[1],), default) if tensor is None else tensor)
    return batch_norm(view, x, norm)  # type: ignore[arg-type]


def _refuse_draws(rules: PassRules, func: Any, *args: Any, **kwargs: Any) -> Any:
    if rules.is_first:
        return func(*args, **kwargs)
    name = resolve_name(func) or getattr(func, "__name__", str(func))
    raise ConfigError(f"a module draws random numbers with {name}, which no other number of workers would repeat")


_RULES: dict[Any, Callable[..., Any]] = {
    functional.dropout: _dropout,
    functional.batch_norm: _batch_norm,
    functional.multi_head_attention_forward: _attention,
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


# -- norms over all nodes: (view, module, x) → x --


def _pair_norm(view: GraphView, module: Any, x: Tensor) -> Any:
    x = x - mean_over_nodes(view, x)
    if module.scale_individually:
        return module.scale * x / (module.eps + x.norm(2, -1, keepdim=True))
    squares = mean_over_nodes(view, x.pow(2).sum(-1, keepdim=True))
    return module.scale * x / (module.eps + squares).sqrt()


def _graph_norm(view: GraphView, module: Any, x: Tensor) -> Any:
    x = x - mean_over_nodes(view, x) * module.mean_scale
    return module.weight * x / (mean_over_nodes(view, x.pow(2)) + module.eps).sqrt() + module.bias


def _graph_layer_norm(view: GraphView, module: Any, x: Tensor) -> Any:
    if module.mode != "graph":
        return type(module).forward(module, x)
    x = x - mean_over_nodes(view, x).mean()
    x = x / (mean_over_nodes(view, x.pow(2)).mean().sqrt() + module.eps)
    return x if module.weight is None else x * module.weight + module.bias


def _instance_norm(view: GraphView, module: Any, x: Tensor) -> Any:
    uses_statistics = module.training or not module.track_running_stats
    return _norm_columns(view, module, x) if uses_statistics else type(module).forward(module, x)


_NORMS: dict[str, Callable[[GraphView, Any, Tensor], Any]] = {
    "PairNorm": _pair_norm,
    "GraphNorm": _graph_norm,
    "LayerNorm": _graph_layer_norm,
    "MeanSubtractionNorm": lambda view, module, x: x - mean_over_nodes(view, x),
    "GraphSizeNorm": lambda view, module, x: x * view.sum_over_nodes(x.new_full((1,), len(x))).pow(-0.5),
    "InstanceNorm": _instance_norm,
}


def _norm_rule(name: str) -> Callable[..., Any]:
    """Apply a norm to calls without a batch vector, which are of one graph."""

    def rule(view: GraphView, module: Any, forward: Any, x: Tensor, batch: Any = None, *args: Any) -> Any:
        return _NORMS[name](view, module, x) if batch is None else forward(x, batch, *args)

    return rule


def reads_all_nodes(module: torch.nn.Module) -> bool:
    """True for modules of torch_geometric with a rule over all nodes, among them all its norms but batch norm."""
    kinds = _MODULE_RULES.keys() - TYPED_MODULES.keys() - {"QuantileAggregation"}
    return not kinds.isdisjoint(_library_classes(module)) and getattr(module, "mode", "graph") == "graph"


def _library_classes(module: torch.nn.Module) -> list[str]:
    return [kind.__name__ for kind in type(module).__mro__ if kind.__module__.startswith("torch_geometric.")]


_MODULE_RULES = GLOBAL_MODULES | TYPED_MODULES | {name: _norm_rule(name) for name in _NORMS}


_NORM = "gcn_norm"
_MEANS = {"ClusterGCNConv"}  # their sums are divided by the number of messages


def normalization_rule(module: torch.nn.Module) -> Callable[..., Any] | None:
    """Call the forward of a convolution that uses gcn_norm with degrees of the whole graph."""
    original = getattr(type(module).forward, "__globals__", {}).get(_NORM)
    if original is None or original.__module__ != "torch_geometric.nn.conv.gcn_conv":
        return None
    return with_function(_NORM, lambda view: partial(_normalize, original))


def _normalize(
    original: Any,
    edge_index: Any,
    edge_weight: Tensor | None = None,
    num_nodes: int | None = None,
    improved: bool = False,
    add_self_loops: bool = True,
    flow: str = "source_to_target",
    dtype: torch.dtype | None = None,
) -> tuple[Any, Tensor]:
    """``gcn_norm`` of torch_geometric; the degrees are static numbers wherever a view does not list all in-edges."""
    edges = edge_index.fetcher.edges if isinstance(edge_index, SourceIndex) else None
    if edges is None or edges.fetched_degree is None:
        return original(edge_index, edge_weight, num_nodes, improved, add_self_loops, flow, dtype)  # type: ignore[no-any-return]
    is_graph = edge_index.edge_ids is edges.edge_ids and (
        edge_weight is None or edge_weight is edge_index.fetcher.inputs.get("edge_weight")
    )
    if not is_graph or flow != "source_to_target" or not add_self_loops:
        raise ConfigError("gcn_norm needs degrees of other edges or weights than those of the graph with self-loops")
    degree = edges.fetched_degree(COUNT if edge_weight is None else WEIGHTED).double()
    loops = edges.fetched_degree(LOOPS).double() if edge_weight is not None else torch.ones_like(degree)
    loops = loops.nan_to_num(2.0 if improved else 1.0)
    degree = degree + loops
    add = original.__globals__["add_remaining_self_loops"]
    count = len(edges.source_ids)
    edge_index, weight = add(edge_index, edge_weight, 1.0, count)
    scale = torch.where(degree > 0, degree, torch.inf).rsqrt()
    src, dst = plain(edge_index)
    # A sample may lack the self-loop of a node.
    weight = scale.new_ones(()) if weight is None else torch.cat([weight[: len(dst) - count], loops[:count]])
    return edge_index, (scale[src] * weight * scale[dst]).to(dtype if edge_weight is None else edge_weight.dtype)


def scaled_messages(convolution: Any, index: Any, messages: Tensor) -> Tensor:
    """Scale messages that a convolution sums over a sample of the neighbours; self-loops that it added stay.

    Means, maxima and weights of a softmax are those of the sample.
    """
    edges = index.fetcher.edges if isinstance(index, SourceIndex) else None
    if edges is None or edges.sampling_scale is None or not _is_sum(convolution):
        return messages
    scale = edges.sampling_scale()[plain(index)[1].clamp(max=edges.num_dst - 1)]
    scale = torch.where(index.edge_ids < SELF_LOOP_IDS, scale, 1.0).to(messages.dtype)
    shape = [1] * messages.dim()
    shape[convolution.node_dim] = len(scale)
    return messages * scale.view(shape)


def _is_sum(convolution: Any) -> bool:
    """True if messages are summed with weights that do not depend on their number; raises ConfigError if unknown."""
    kinds = [kind for kind in type(convolution).__mro__ if kind.__name__ != "MessagePassing"]
    functions = [f for kind in kinds for f in vars(kind).values() if isinstance(f, FunctionType)]
    aggregations = {type(module).__name__ for module in getattr(convolution.aggr_module, "modules", list)()}
    is_own = any(f.__name__ == "aggregate" for f in functions) or not aggregations
    if is_own or (len(aggregations) > 1 and not aggregations.isdisjoint({"SumAggregation", "MulAggregation"})):
        raise ConfigError(
            f"{type(convolution).__name__} combines messages in its own way, so sums over sampled neighbours cannot be "
            "scaled to all of them: read all neighbours (strategy.fanouts of −1), or use sar or pipe"
        )
    is_normalized = any("softmax" in f.__code__.co_names for f in functions) or kinds[0].__name__ in _MEANS
    return aggregations == {"SumAggregation"} and not is_normalized
