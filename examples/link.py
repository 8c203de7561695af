"""Link prediction: edges split by a rule, ranks of held-out edges, and the most likely new neighbours of a node.

python examples/link.py
"""

from __future__ import annotations

import gnnfleet as gf
from gnnfleet.graph.datasets import make_dataset


def main() -> float:
    graph = make_dataset("communities", nodes=2000, mean_degree=20, seed=1)

    # 80 % of the edges carry messages. In every epoch a third of them is masked, and only that third is predicted.
    record = gf.train(
        graph,
        task="link",
        split="0.8/0.1/0.1",
        model=gf.nn.SAGE(hidden=64, layers=2, dropout=0.1),
        epochs=30,
        lr=0.01,
        eval_every=5,
        **{"link.exclude": "disjoint:0.33", "link.negatives": 5},
    )
    print(f"{record.metrics['name']} of held-out edges, each among 100 negatives: {record.metrics['test']:.3f}")

    scores = record.score([(7, other) for other in range(2000)])
    scores[7] = 0
    print("most likely neighbours of node 7:", scores.topk(5).indices.tolist())
    return float(record.metrics["test"])


if __name__ == "__main__":
    main()
