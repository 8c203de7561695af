"""Learning tasks: classes of nodes, links, events; independent of how a graph is distributed."""
