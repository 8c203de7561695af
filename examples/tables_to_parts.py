"""From raw tables to the part that one worker opens, in Python. The same on the command line:

gnnfleet import people.csv links.csv -o social/ --undirected --split 0.6/0.2/0.2
gnnfleet partition social/ --parts 2
"""

import csv
import random
import tempfile
from dataclasses import replace
from pathlib import Path

import gnnfleet as gf
from gnnfleet.graph.ingest.tables import classify_tables, import_tables
from gnnfleet.graph.partition.assign import assign_nodes
from gnnfleet.graph.partition.edge_scan import measure_partition
from gnnfleet.graph.partition.partitioned_graph import write_partition


def write_tables(folder: Path) -> list[str]:
    """Write two groups of friends with a few links between them."""
    random.seed(0)
    names = [f"{circle}-{i:02d}" for circle in ("red", "blue") for i in range(30)]
    with (folder / "people.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["id", "age", "height", "label"])
        writer.writerows([name, random.randint(18, 80), random.gauss(1.7, 0.1), name.split("-")[0]] for name in names)
    links = [(a, b) for a in names for b in names if a < b and random.random() < (0.3 if a[0] == b[0] else 0.01)]
    with (folder / "links.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("src", "dst"), *links])
    return [str(folder / "people.csv"), str(folder / "links.csv")]


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        spec = replace(classify_tables(write_tables(folder)), undirected=True, split_rule="0.6/0.2/0.2")
        import_tables(spec, folder / "social")
        graph = gf.open(folder / "social")
        print(graph, "classes", graph.single_nodes.classes)

        assignment = assign_nodes(graph, 2, "mincut")
        quality = measure_partition(graph, assignment.part, 2)
        print(f"{quality.kept_edges} of {graph.num_edges} edges kept, {quality.volume} rows sent in each layer")

        partition = write_partition(graph, assignment, folder / "social" / "parts" / "two")
        shard = partition.shard(0)
        nodes = shard.nodes("node")
        ids = graph.single_nodes.ids.select(nodes.store_ids).to_pylist()
        plan = shard.plan("node", "in")
        print(f"part 0 has {nodes.count} people ({', '.join(ids[:3])}, …) and needs {len(plan.recv[1])} rows of part 1")


if __name__ == "__main__":
    main()
